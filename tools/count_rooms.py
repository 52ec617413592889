"""Counts files, lines of code and imports of the rooms of `src/quire`, and lines of scripts.

    tools/count_rooms.py           prints the counts of the working tree
    tools/count_rooms.py REVISION  prints the counts of a commit

A room is a folder, or a file that stands directly in the counted folder. An arrow is an import of
one room by another, counted once. Lines of code exclude blanks, comments and docstrings.
docs/internals/rooms.md draws them.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("bench", "tools")
FOLDERS = ("quire", "quire.ops.triton", "quire.engine", "quire.server", "quire.features")
LAYOUT = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Counts the rooms of src/quire.")
    parser.add_argument("revision", nargs="?", help="a commit; left out, the working tree")
    revision = parser.parse_args().revision
    modules = dict(sources(revision))
    for folder in FOLDERS:
        rooms, arrows = count_rooms(modules, folder)
        both_ways = sum((after, before) in arrows for before, after in arrows) // 2
        print(f"{folder}: {len(rooms)} rooms, {len(arrows)} arrows, {both_ways} pairs both ways")
        for room, lines in sorted(rooms.items()):
            print(f"  {room:24}{lines:7}")
    print(f"{len(modules)} files, {sum(map(code_lines, modules.values()))} lines of code")
    for folder in SCRIPTS:
        texts = [text for _, text in files(folder, revision)]
        print(f"{folder}/: {len(texts)} files, {sum(map(code_lines, texts))} lines of code")
    return 0


def sources(revision: str | None) -> Iterator[tuple[str, str]]:
    """Yields (module, text) of each Python file of the package."""
    for name, text in files("src/quire", revision):
        yield module_name(name.removeprefix("src/")), text


def files(folder: str, revision: str | None) -> Iterator[tuple[str, str]]:
    """Yields (path, text) of each Python file of a folder."""
    if revision is None:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text("utf-8")
        return
    for name in git("ls-tree", "-r", "--name-only", revision, folder).split():
        if name.endswith(".py"):
            yield name, git("show", f"{revision}:{name}")


def git(*arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True)


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def count_rooms(
    modules: Mapping[str, str], folder: str
) -> tuple[Counter[str], set[tuple[str, str]]]:
    """Counts the rooms of a folder.

    Returns:
        The lines of code of each room, and the arrows (room, imported room).
    """
    rooms: Counter[str] = Counter()
    arrows = set()
    for name, text in modules.items():
        if (room := room_of(name, folder)) is not None:
            rooms[room] += code_lines(text)
            arrows |= {(room, room_of(target, folder)) for target in imports(text)}
    return rooms, {(room, other) for room, other in arrows if other in rooms and other != room}


def room_of(module: str, folder: str) -> str | None:
    """Returns the room of a folder that holds a module, or None."""
    if not module.startswith(f"{folder}."):
        return None
    return module.removeprefix(f"{folder}.").partition(".")[0]


def imports(text: str) -> Iterator[str]:
    """Yields the modules and names that a text imports from `quire`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def code_lines(text: str) -> int:
    """Returns the lines that hold code: no blanks, comments or docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


if __name__ == "__main__":
    raise SystemExit(main())
