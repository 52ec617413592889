"""Writes the code of `mine.py` and other files into the lessons' pages: python -m lessons.pages

A page names a piece in a comment, and the block of code behind the comment is that piece:

    <!-- mine.py: Model.attention..rotate -->

A piece is a definition, or all from one definition to the end of another. `imports` are those at
the beginning of the lesson's section, and `main` is the block that runs the file.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
BLOCK = re.compile(r"(<!-- ([\w.]+\.py): ([^ ]+) -->\n+```python\n)(.*?)(?=```)", re.DOTALL)
SECTION = re.compile(r"^# ---- Lesson (\d+):.*\n", re.MULTILINE)


def sections(text: str) -> dict[int, str]:
    """Returns the sections of `mine.py` by lesson, without their first lines."""
    found = [(int(each[1]), each.end(), each.start()) for each in SECTION.finditer(text)]
    ends = [start for _, _, start in found[1:]] + [len(text)]
    return {number: text[at:end] for (number, at, _), end in zip(found, ends, strict=True)}


def until(number: int) -> str:
    """Returns `mine.py` as it is after a lesson."""
    text = (HERE / "mine.py").read_text("utf-8")
    later = [each.start() for each in SECTION.finditer(text) if int(each[1]) > number]
    return text[: later[0]].rstrip() + "\n" if later else text


def spans(text: str) -> dict[str, tuple[int, int]]:
    """Returns the first and last line, from 1 on, of each definition: `Model`, `Model.forward`."""
    found: dict[str, tuple[int, int]] = {}

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node, after in zip(body, [*body[1:], None], strict=True):
            first, last = node.lineno, node.end_lineno or node.lineno
            names = []
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names = [node.name]
                first = min([first, *(each.lineno for each in node.decorator_list)])
            elif isinstance(node, ast.Assign):
                names = [each.id for each in node.targets if isinstance(each, ast.Name)]
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names = ["imports"]
                first = found.get("imports", (first, last))[0]
            elif isinstance(node, ast.If):
                names = ["main"]
            if isinstance(node, ast.Assign) and isinstance(after, ast.Expr):
                last = after.end_lineno or last  # a string that says what it is
            found.update({prefix + name: (first, last) for name in names})
            if isinstance(node, ast.ClassDef):
                walk(node.body, f"{node.name}.")

    walk(ast.parse(text).body, "")
    return found


def piece(text: str, name: str) -> str:
    """Returns a piece of a file by its name on the page."""
    first, _, last = name.partition("..")
    known = spans(text)
    owner = first.partition(".")[0]
    end = last and (f"{owner}.{last}" if f"{owner}.{last}" in known else last)
    lines = text.splitlines(keepends=True)
    return "".join(lines[known[first][0] - 1 : known[end or first][1]])


def source(page: Path, file: str) -> str:
    """Returns the text that a page's pieces of a file come from."""
    if file == "mine.py":
        return sections((HERE / file).read_text("utf-8"))[int(page.parent.name[:2])]
    return (page.parent / file).read_text("utf-8")


def filled(page: Path) -> str:
    """Returns the page's text with the code as the files have it."""
    return BLOCK.sub(
        lambda found: found[1] + piece(source(page, found[2]), found[3]), page.read_text("utf-8")
    )


def shown(page: Path) -> str:
    """Returns what a page shows of its section of `mine.py`, without blank lines."""
    parts = [found[4] for found in BLOCK.finditer(page.read_text("utf-8")) if found[2] == "mine.py"]
    return dense("".join(parts))


def dense(text: str) -> str:
    """Returns a text without blank lines."""
    return "".join(line for line in text.splitlines(keepends=True) if line.strip())


def main() -> None:
    for page in sorted(HERE.glob("[0-9][0-9]_*/README.md")):
        page.write_text(filled(page), "utf-8")


if __name__ == "__main__":
    main()
