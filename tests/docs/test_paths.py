"""Files and modules that the pages and lessons name exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT

SOURCE = ROOT / "src" / "quire"
LESSONS = sorted((ROOT / "lessons").rglob("*.py"))
FOLDERS = ("src", "tests", "tools", "bench", "deploy", "docs", "examples", "lessons", ".github")
"""Folders of the repository in which named files may lie."""
SPAN = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(?<![\w/.{<-])(?:[\w-]+/)*[\w-]+\.(?:py|html)(?![\w.])")
FOLDER = re.compile(
    r"(?<![\w/.{<-])(?:src|tests|tools|bench|deploy|lessons|docs)/[\w/-]+(?![\w.*{<-])"
)
MODULE = re.compile(r"\bquire(?:\.[a-z_]\w*)+\b(?!\.)")
NOT_HERE = {
    "src/quire/models/families/starcoder2.py": "the page writes it",
}
"""Paths that a page names and that do not exist, and why."""
NO_MODULES = ("yaml", "json", "jsonl", "service", "env", "key", "csv", "log", "conf")
"""Endings of files that are called quire, and are no modules."""
ATTRIBUTES = (
    "quire.time_to_first_token", "quire.replica", "quire.prefill", "quire.attempts",
    "quire.handover.outcome", "quire.request.id",
)  # fmt: skip
"""Names of attributes in traces."""


@cache
def files() -> tuple[str, ...]:
    """Returns the paths of the repository's files, each behind a slash."""
    found = [path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.is_file()]
    return tuple("/" + path.relative_to(ROOT).as_posix() for path in found)


def is_there(name: str, page: Path) -> bool:
    """Tells whether a path is one of the repository, of the package, or of the page's folder.

    A path may leave out its first folders, as `families/llama.py` does.
    """
    if any((folder / name).exists() for folder in (ROOT, SOURCE, page.parent)):
        return True
    return any(file.endswith(f"/{name}") for file in files())


def module_is_there(name: str) -> bool:
    """Tells whether `quire.x.y` is a module, or a name in one."""
    folder, parts = SOURCE, name.split(".")[1:]
    while parts and (folder / parts[0]).is_dir():
        folder /= parts.pop(0)
    file = folder / "__init__.py"
    if parts and (folder / f"{parts[0]}.py").exists():
        file = folder / f"{parts.pop(0)}.py"
    return not parts or re.search(rf"\b{parts[0]}\b", file.read_text("utf-8")) is not None


@pytest.mark.parametrize(
    "page", [*PAGES, *LESSONS], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_named_files_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    for span in SPAN.findall(text):
        for name in (*FILE.findall(span), *FOLDER.findall(span)):
            if name not in NOT_HERE:
                assert is_there(name, page), name


@pytest.mark.parametrize(
    "page", [*PAGES, *LESSONS], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_named_modules_exist(page: Path) -> None:
    for name in MODULE.findall(page.read_text("utf-8")):
        if name.split(".")[1] not in NO_MODULES and name not in ATTRIBUTES:
            assert module_is_there(name), name


def test_every_package_has_a_row() -> None:
    """The table of packages names every package, and no other."""
    section = (ROOT / "ARCHITECTURE.md").read_text("utf-8").partition("## The house")[2]
    section = section.partition("\n## ")[0]
    rows = set(re.findall(r"^\| `(\w+)/` \|", section, re.MULTILINE))
    assert rows == {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}


def test_every_feature_has_a_row() -> None:
    section = (ROOT / "ARCHITECTURE.md").read_text("utf-8").partition("## Features")[2]
    section = section.partition("<!-- core: begin -->")[0]
    rows = set(re.findall(r"^\| `(\w+)/` \|", section, re.MULTILINE))
    folders = (SOURCE / "features").iterdir()
    assert rows == {path.name for path in folders if (path / "__init__.py").exists()}
