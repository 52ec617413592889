"""Moves modules to new places and rewrites what names them: imports, dotted names, paths.

    python tools/rooms/move.py --dry     checks the map and prints what it would do
    python tools/rooms/move.py           moves; run in a clean tree
    python tools/rooms/move.py --verify REV   compares each function's syntax tree with revision REV

The map is `map.py`: files that move or merge, and folders. Nothing but names of modules changes;
private names that would meet in a merged file get the suffix of their old file, and are printed.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import map as rooms_map  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TEXT = {
    ".py",
    ".md",
    ".toml",
    ".yml",
    ".yaml",
    ".json",
    ".sh",
    ".cfg",
    ".txt",
    ".html",
    ".js",
    ".mjs",
    "",
}
NAMES = Path(__file__).with_name("names.json")
PROBLEMS: list[str] = []
SKIPPED = ("tools/rooms/", "bench/results/", "CHANGELOG.md")


def git(*args: str) -> str:
    return subprocess.run(
        ["git", *args], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


@dataclass
class Move:
    """Old files, in order, that become one new file. Paths are relative to the root."""

    target: str
    sources: list[str] = field(default_factory=list)


class Plan:
    """Old paths and modules to new ones."""

    def __init__(self, room: str) -> None:
        prefixes = rooms_map.ORDER[room] if room else ("",)
        self.files = git("ls-files").split("\n")[:-1]
        present = set(self.files)
        self.path: dict[str, str] = {}
        self.merges: dict[str, list[str]] = {}
        for base, all_merges, all_folders in rooms_map.ROOMS:
            merges = {t: s for t, s in all_merges.items() if (base + t).startswith(prefixes)}
            folders = [(o, n) for o, n in all_folders if (base + n).startswith(prefixes)]
            for target, sources in merges.items():
                here = [base + s for s in sources.split() if base + s in present]
                missing = [s for s in sources.split() if base + s not in present]
                if missing:
                    print("missing:", base, missing)
                if not here:
                    continue
                for source in here:
                    if source in self.path:
                        sys.exit(f"twice in the map: {source}")
                    self.path[source] = base + target
                if len(here) > 1:
                    self.merges[base + target] = here
            for old, new in folders:
                for file in self.files:
                    if file.startswith(base + old) and file not in self.path:
                        self.path[file] = base + new + file[len(base + old) :]
        taken: dict[str, str] = {}
        for file in self.files:
            new = self.path.setdefault(file, file)
            if new in taken and new not in self.merges:
                sys.exit(f"{file} and {taken[new]} both become {new}")
            taken[new] = file
        self.module = {
            module_of(old): module_of(new)
            for old, new in self.path.items()
            if old.endswith(".py") and module_of(old)
        }
        # A folder's dotted name, for packages whose __init__ goes elsewhere or is gone.
        self.folder = {}
        for base, _, folders in rooms_map.ROOMS:
            for old, new in folders:
                if (base + new).startswith(prefixes):
                    self.folder[base + old] = base + new


def module_of(path: str) -> str:
    if path.startswith("src/"):
        path = path[4:]
    elif not path.startswith(("tests/", "lessons/")):
        return ""
    name = path.removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


class Rewriter:
    """Rewrites one file's imports and mentions of modules and paths."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.notes: list[str] = []
        self.aliases: dict[str, str] = {}
        names: dict[str, set[str]] = defaultdict(set)
        for old in plan.path:
            if old.endswith(".py"):
                names[old.rsplit("/", 1)[-1]].add(old)
        self.unique = {name: next(iter(found)) for name, found in names.items() if len(found) == 1}

    def python(self, old_path: str, source: str) -> str:
        target = module_of(self.plan.path[old_path]) or "?"
        tree = ast.parse(source)
        edits: list[tuple[int, int, str]] = []
        starts = line_starts(source)
        identifiers = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        renames: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                text = self.import_from(node, target, old_path, identifiers, renames)
                if text is not None:
                    edits.append((*span(node, starts), text))
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    new = self.plan.module.get(alias.name)
                    if new and new != alias.name:
                        begin, end = span(alias, starts)
                        suffix = f" as {alias.asname}" if alias.asname else ""
                        edits.append((begin, end, new + suffix))
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id in renames:
                edits.append((*span(node, starts), renames[node.id]))
        edits += self.texts(old_path, source, starts)
        return apply(source, edits)

    def texts(self, old_path: str, source: str, starts: list[int]) -> list[tuple[int, int, str]]:
        """Returns the edits of comments and strings, which name modules and files."""
        edits = []
        lines = source.splitlines(keepends=True)
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                new = self.mentions(old_path, token.string)
                if new != token.string:
                    (row, column), (end_row, end_column) = token.start, token.end
                    begin = starts[row - 1] + len(lines[row - 1][:column].encode())
                    end = starts[end_row - 1] + len(lines[end_row - 1][:end_column].encode())
                    edits.append((begin, end, new))
        return edits

    def import_from(
        self,
        node: ast.ImportFrom,
        target: str,
        old_path: str,
        identifiers: set[str],
        renames: dict[str, str],
    ) -> str | None:
        modules = self.plan.module
        module = node.module or ""
        if module.split(".")[0] not in ("quire", "tests", "lessons"):
            return None
        lines: dict[str, list[str]] = defaultdict(list)
        changed = False
        for alias in node.names:
            full = f"{module}.{alias.name}"
            if full in modules:
                new = modules[full]
                changed |= new != full
                parent, _, leaf = new.rpartition(".")
                shown = alias.asname
                if leaf != alias.name and not shown:
                    if leaf in identifiers:
                        shown = alias.name
                        self.notes.append(f"{old_path}: {full} stays {alias.name}")
                    else:
                        renames[alias.name] = leaf
                        self.aliases[alias.name] = leaf
                lines[parent].append(leaf + (f" as {shown}" if shown and shown != leaf else ""))
                continue
            new = modules.get(module, module)
            changed |= new != module
            if new == target:
                if alias.asname:
                    self.notes.append(f"{old_path}: imports {full} as {alias.asname} of itself")
                    renames[alias.asname] = alias.name
                changed = True
                continue
            lines[new].append(alias.name + (f" as {alias.asname}" if alias.asname else ""))
        if not changed:
            return None
        indent = " " * node.col_offset
        out = [f"from {m} import {', '.join(n)}" for m, n in lines.items()]
        if not out:
            return "pass  # nothing left to import" if node.col_offset else ""
        return ("\n" + indent).join(out)

    DOTTED = re.compile(r"\b(?:quire|tests)(?:\.[a-z_0-9]+)+")
    PATH = re.compile(r"(?<![\w./-])((?:[a-z0-9_.]+/)*[a-z0-9_]+\.(?:py|html|json|xz|mjs))\b")
    FOLDER = re.compile(
        r"(?<![\w./-])((?:src/quire/|tests/)?[a-z_]+(?:/[a-z_0-9]+)*)/(?=[`\s\"',)*:;]|$)", re.M
    )

    def mentions(self, old_path: str, text: str) -> str:
        kept: list[str] = []

        def keep(match: re.Match[str]) -> str:
            kept.append(self.import_in_text(match))
            return f"\0{len(kept) - 1}\0"

        text = self.IMPORT.sub(keep, text)
        text = self.DOTTED.sub(lambda m: self.dotted(m[0]), text)
        text = re.sub("\0(\\d+)\0", lambda m: kept[int(m[1])], text)
        if old_path.endswith((".js", ".html", ".mjs")):
            return text
        text = self.PATH.sub(lambda m: self.file(old_path, m[1]), text)
        return self.FOLDER.sub(lambda m: self.named_folder(m[1]) + "/", text)

    IMPORT = re.compile(
        r"^([ >.]*)from ((?:quire|tests)[.\w]*) import (\w+(?: as \w+)?(?:, \w+(?: as \w+)?)*)$",
        re.M,
    )

    def import_in_text(self, match: re.Match[str]) -> str:
        """Returns an import that stands in a string or on a page, with its new modules."""
        before, module, names = match.groups()
        lines: dict[str, list[str]] = defaultdict(list)
        for entry in names.split(", "):
            name, _, shown = entry.partition(" as ")
            full = self.plan.module.get(f"{module}.{name}")
            if full is None:
                lines[self.plan.module.get(module, module)].append(entry)
                continue
            parent, _, leaf = full.rpartition(".")
            shown = shown or (name if leaf != name else "")
            lines[parent].append(leaf + (f" as {shown}" if shown else ""))
        return "\n".join(f"{before}from {m} import {', '.join(n)}" for m, n in lines.items())

    def dotted(self, name: str) -> str:
        parts = name.split(".")
        for length in range(len(parts), 1, -1):
            new = self.plan.module.get(".".join(parts[:length]))
            if new is not None:
                return ".".join([new, *parts[length:]])
        return name

    def file(self, old_path: str, name: str) -> str:
        paths = self.plan.path
        folder = old_path.rsplit("/", 1)[0] + "/" if "/" in old_path else ""
        for prefix in ("", "src/quire/", "src/", "tests/"):
            new = paths.get(prefix + name)
            if new is not None:
                return new[len(prefix) :] if new.startswith(prefix) else new
        if "/" not in name:
            here = paths.get(folder + name)
            if here is not None:
                new_folder = paths[old_path].rsplit("/", 1)[0] + "/"
                if here.startswith(new_folder):
                    return here[len(new_folder) :]
                return here.removeprefix("src/quire/")
            found = self.unique.get(name)
            if found is not None and found.startswith("src/quire/"):
                new = paths[found]
                return new.rsplit("/", 1)[-1]
        return name

    def named_folder(self, name: str) -> str:
        if (ROOT / name).is_dir() and not name.startswith(("src/", "tests/")):
            return name
        for prefix in ("", "src/quire/"):
            old = prefix + name + "/"
            new = self.plan.folder.get(old)
            if new is not None and (prefix or old.startswith(("src/quire/", "tests/"))):
                return new[len(prefix) :].rstrip("/")
            longest = max(
                (f for f in self.plan.folder if old.startswith(f) and f.count("/") >= 3),
                key=len,
                default=None,
            )
            if longest is not None:
                return (self.plan.folder[longest] + old[len(longest) :])[len(prefix) :].rstrip("/")
        return name


def line_starts(source: str) -> list[int]:
    starts = [0]
    for line in source.encode().split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    return starts


def span(node: ast.AST, starts: list[int]) -> tuple[int, int]:
    return (
        position(node.lineno, node.col_offset, starts),
        position(node.end_lineno, node.end_col_offset, starts),
    )  # type: ignore[attr-defined]


def position(line: int, column: int, starts: list[int]) -> int:
    return starts[line - 1] + column


def apply(source: str, edits: list[tuple[int, int, str]]) -> str:
    data = source.encode()
    for begin, end, text in sorted(set(edits), reverse=True):
        if text == "" and data[end : end + 1] == b"\n":
            end += 1
        data = data[:begin] + text.encode() + data[end:]
    return data.decode()


@dataclass
class Piece:
    """A source file in parts: its docstring, its first imports, the rest."""

    path: str
    doc: str
    imports: list[str]
    checking: list[str]
    body: str


def split(path: str, source: str) -> Piece:
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    doc = ast.get_docstring(tree) or ""
    imports: list[str] = []
    checking: list[str] = []
    end = 0
    for index, node in enumerate(tree.body):
        if index == 0 and doc:
            end = node.end_lineno or 0
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            text = ast.get_source_segment(source, node) or ""
            if "__future__" not in text:
                imports.append(text)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            checking += [ast.get_source_segment(source, n) or "" for n in node.body]
        else:
            break
        end = node.end_lineno or 0
    return Piece(path, doc, imports, checking, "".join(lines[end:]).strip("\n") + "\n")


def defined(source: str) -> dict[str, str]:
    """Returns each top-level name that a source defines, and its syntax tree's text."""
    names: dict[str, str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = ast.dump(node)
        elif isinstance(node, ast.Assign):
            for aim in node.targets:
                if isinstance(aim, ast.Name):
                    names[aim.id] = ast.dump(node)
        elif isinstance(
            node, ast.AnnAssign | ast.TypeAlias if hasattr(ast, "TypeAlias") else ast.AnnAssign
        ):
            if isinstance(node.target, ast.Name):
                names[node.target.id] = ast.dump(node)
    return names


def bound(imports: list[str]) -> dict[str, str]:
    names = {}
    for text in imports:
        for node in ast.parse(text).body:
            for alias in getattr(node, "names", []):
                module = getattr(node, "module", "") or ""
                name = alias.asname or alias.name.split(".")[0]
                plain = isinstance(node, ast.Import) and not alias.asname
                names[name] = name if plain else f"{module}:{alias.name}"
    return names


def renamed(source: str, names: dict[str, str]) -> str:
    edits = []
    starts = line_starts(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and node.id in names:
            edits.append((*span(node, starts), names[node.id]))
        elif (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and node.name in names
            and node.col_offset == 0
        ):
            begin = starts[node.lineno - 1]
            at = source.encode().index(node.name.encode(), begin + node.col_offset)
            edits.append((at, at + len(node.name), names[node.name]))
        elif isinstance(node, ast.Global):
            edits.append(
                (*span(node, starts), "global " + ", ".join(names.get(n, n) for n in node.names))
            )
    return apply(source, edits)


def merge(target: str, pieces: list[Piece]) -> tuple[str, list[str]]:
    """Returns the merged source, and the names that changed."""
    notes: list[str] = []
    imports: list[str] = []
    checking: list[str] = []
    have: dict[str, str] = {}
    bodies: list[str] = []
    all_bound: dict[str, str] = {}
    for piece in pieces:
        body = piece.body
        own = defined(body)
        clash = {}
        for name, tree in own.items():
            if name in have:
                if have[name] == tree and not name.startswith("__"):
                    clash[name] = None
                elif name == "__all__":
                    clash[name] = None
                elif name.startswith("_") or name.isupper() or name == "LOG":
                    stem = Path(piece.path).stem
                    clash[name] = (
                        f"{name}_{stem}" if not name.isupper() else f"{name}_{stem.upper()}"
                    )
                else:
                    PROBLEMS.append(f"{target}: {name} of {piece.path} is defined twice")
        drop = {n for n, new in clash.items() if new is None}
        if drop:
            body = without(body, drop)
        change = {n: new for n, new in clash.items() if new}
        if change:
            body = renamed(body, change)
            notes += [f"{piece.path}: {n} is {new} in {target}" for n, new in change.items()]
        have |= {change.get(n, n): t for n, t in own.items() if n not in drop}
        for name, what in bound(piece.imports + piece.checking).items():
            if all_bound.setdefault(name, what) != what:
                PROBLEMS.append(
                    f"{target}: {name} is both {all_bound[name]} and {what} ({piece.path})"
                )
        imports += piece.imports
        checking += piece.checking
        title = ""
        if bodies:
            first = piece.doc.split("\n\n")[0].replace("\n", " ")
            title = "\n".join(wrap_comment(first)) + "\n\n"
        bodies.append(title + body)
    for name in bound(imports):
        if name in have:
            PROBLEMS.append(f"{target}: {name} is imported by one file and defined by another")
    imports = list(dict.fromkeys(imports))
    known = bound(imports)
    checking = [
        t
        for t in dict.fromkeys(checking)
        if not all(known.get(k) == v for k, v in bound([t]).items())
    ]
    doc = rooms_map.DOCS.get(target.removeprefix("src/quire/"), pieces[0].doc)
    out = [
        f'"""{doc}"""\n' if "\n" not in doc else f'"""{doc}\n"""\n',
        "\nfrom __future__ import annotations\n\n",
    ]
    out.append("\n".join(imports) + "\n")
    if checking:
        if not any("TYPE_CHECKING" in t for t in imports):
            out.append("from typing import TYPE_CHECKING\n")
        out.append("\nif TYPE_CHECKING:\n" + "".join(f"    {t}\n" for t in checking))
    out.append("\n" + "\n\n".join(bodies))
    return "".join(out), notes


def wrap_comment(text: str) -> list[str]:
    import textwrap

    return [f"# {line}" for line in textwrap.wrap(text, 96)]


def without(source: str, names: set[str]) -> str:
    lines = source.splitlines(keepends=True)
    body = ast.parse(source).body
    for index, node in reversed(list(enumerate(body))):
        found = (
            defined(ast.get_source_segment(source, node) or "")
            if not isinstance(node, ast.Expr)
            else {}
        )
        if found and set(found) <= names:
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            last = node.end_lineno or 0
            after = body[index + 1] if index + 1 < len(body) else None
            if (
                isinstance(node, ast.Assign | ast.AnnAssign)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                last = after.end_lineno or last
            del lines[first - 1 : last]
    return "".join(lines)


def run(dry: bool, room: str) -> None:
    plan = Plan(room)
    rewriter = Rewriter(plan)
    contents: dict[str, str] = {}
    notes: list[str] = []
    rewritten: dict[str, str] = {}
    for old in plan.files:
        path = ROOT / old
        if path.suffix not in TEXT or old.startswith(SKIPPED) or path.is_symlink():
            continue
        try:
            source = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        if old.endswith(".py"):
            new = rewriter.python(old, source)
        else:
            new = rewriter.mentions(old, source)
        for before, after in rooms_map.REPLACED.get(old, ()):
            new = new.replace(before, after)
        rewritten[old] = new
    for target, sources in plan.merges.items():
        text, changes = merge(target, [split(s, rewritten[s]) for s in sources])
        contents[target] = text
        notes += changes
    for old, text in rewritten.items():
        new = plan.path[old]
        if new not in plan.merges:
            contents[new] = text
    for note in notes + rewriter.notes + PROBLEMS:
        print(note)
    before = json.loads(NAMES.read_text()) if NAMES.exists() else {}
    changed = (
        before
        | rewriter.aliases
        | dict(n.split(": ")[1].split(" in ")[0].split(" is ") for n in notes)
    )
    for before, after in sorted(changed.items()):
        print(f"name: {before} -> {after}")
    NAMES.write_text(json.dumps(changed, indent=1, sort_keys=True) + "\n")
    moved = sum(o != n for o, n in plan.path.items())
    python = [f for f in plan.path.values() if f.startswith("src/quire/") and f.endswith(".py")]
    print(f"{moved} files move; {len(set(python))} Python files in src, {len(python)} before")
    if dry or PROBLEMS:
        return
    for old, new in plan.path.items():
        if old == new and new not in plan.merges:
            continue
        if new in plan.merges and plan.merges[new][0] != old:
            if new != old:
                git("rm", "-q", "--cached", old)
                (ROOT / old).unlink()
            continue
        if old != new:
            (ROOT / new).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / old).rename(ROOT / new)
            git("rm", "-q", "--cached", old)
    for path, text in contents.items():
        (ROOT / path).write_text(text, "utf-8")
    for path, text in rooms_map.NEW.items():
        if any((ROOT / path).parent.glob("**/*.py")) and not (ROOT / path).exists():
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text(text)
    for folder in sorted(ROOT.glob("src/**/"), reverse=True):
        if folder.is_dir() and not any(p.name != "__pycache__" for p in folder.iterdir()):
            for stale in folder.rglob("*"):
                if stale.is_file():
                    stale.unlink()
    for folder in sorted(ROOT.glob("src/**/"), reverse=True) + sorted(
        ROOT.glob("tests/**/"), reverse=True
    ):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    git("add", "-A")


def verify(revision: str) -> None:
    """Prints each function and class whose syntax tree is not what it was."""

    def trees(read: dict[str, str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = defaultdict(list)
        for text in read.values():
            for node in ast.parse(text).body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    found[node.name.lstrip("_")].append(plain(node))
        return found

    def plain(node: ast.AST) -> str:
        for inner in ast.walk(node):
            body = getattr(inner, "body", None)
            if isinstance(body, list):
                inner.body = [  # type: ignore[attr-defined]
                    n
                    for n in body
                    if not isinstance(n, ast.Import | ast.ImportFrom | ast.Pass)
                    and not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
                ]
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                inner.value = "" if "quire." in inner.value or ".py" in inner.value else inner.value
        return re.sub(r"id='\w+'", lambda m: RENAMED.get(m[0], m[0]), ast.dump(node))

    RENAMED = {f"id={old!r}": f"id={new!r}" for old, new in json.loads(NAMES.read_text()).items()}
    old_files = [
        f
        for f in git("ls-tree", "-r", "--name-only", revision, "src/quire").split("\n")
        if f.endswith(".py")
    ]
    old = trees({f: git("show", f"{revision}:{f}") for f in old_files})
    new = trees(
        {
            f: (ROOT / f).read_text()
            for f in git("ls-files", "src/quire").split("\n")
            if f.endswith(".py")
        }
    )
    differ = 0
    gone = {n: set(old[n]) - set(new.get(n, [])) for n in old}
    for name, lost in sorted(gone.items()):
        if lost:
            differ += len(lost)
            print(f"differs: {name}")
    print(f"{sum(map(len, old.values()))} functions and classes, {differ} differ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--room", default="", choices=rooms_map.ORDER, help="only this one")
    parser.add_argument("--verify", metavar="REV")
    options = parser.parse_args()
    if options.verify:
        verify(options.verify)
    else:
        run(options.dry, options.room)
