"""The pages of the documentation, the code on them, and the commands in that code."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING", "WRITEUP")),
    ROOT / "bench" / "README.md",
    ROOT / "bench" / "vs_vllm.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "lessons").rglob("README.md")),
]
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`]+)`")
_ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")


@dataclass(frozen=True)
class Command:
    """A command of a page.

    Attributes:
        page: the page's path in the repository.
        words: the program and its arguments.
        variables: (name, value) of each variable set in front, as in `PORT=1 command`.
    """

    page: str
    words: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"

    @property
    def program(self) -> str:
        """The file's name: `quire` of `.venv/bin/quire`."""
        return Path(self.words[0]).name


def blocks(page: Path) -> list[tuple[str, str]]:
    """Returns (language, text) of a page's blocks of code.

    Pieces of the lessons' files are left out: tests/lessons/test_mine.py compares them. Each has a
    comment before it, which names the file.
    """
    text = page.read_text("utf-8")
    found = [each for each in _BLOCK.finditer(text) if not text[: each.start()].endswith("-->\n")]
    return [(each[2], each[3]) for each in found]


def block_commands() -> list[Command]:
    """Returns the commands of all shell blocks."""
    found = []
    for page in PAGES:
        for language, text in blocks(page):
            if language in ("sh", "bash"):
                lines = text.replace("\\\n", " ").splitlines()
                found += [made for line in lines if (made := _command(page, line))]
    return found


def span_commands(programs: tuple[str, ...]) -> list[Command]:
    """Returns the commands of these programs that pages name in running text, in backticks."""
    found = []
    for page in PAGES:
        for span in _SPAN.findall(_BLOCK.sub("", page.read_text("utf-8"))):
            text = " ".join(span.split())
            if text.startswith(tuple(f"{program} " for program in programs)):
                made = _command(page, text)
                assert made is not None
                found.append(made)
    return found


def _command(page: Path, line: str) -> Command | None:
    words = shlex.split(line, comments=True)
    variables = []
    while words and _ASSIGNMENT.fullmatch(words[0]):
        name, _, value = words.pop(0).partition("=")
        variables.append((name, value))
    name = page.relative_to(ROOT).as_posix()
    return Command(name, tuple(words), tuple(variables)) if words else None
