"""Links between pages and files lead somewhere, and so do their anchors."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT

LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
OTHERS = [ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]


@cache
def anchors(page: Path) -> frozenset[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text("utf-8")), re.MULTILINE)
    names = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    return frozenset(names)


@pytest.mark.parametrize(
    "page", [*PAGES, *OTHERS], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_links(page: Path) -> None:
    for target, anchor in LINK.findall(FENCED.sub("", page.read_text("utf-8"))):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), (target, anchor)


def test_every_page_of_docs_is_linked_to() -> None:
    linked = {
        (page.parent / target).resolve()
        for page in PAGES
        for target, _ in LINK.findall(page.read_text("utf-8"))
        if target
    }
    assert {page.resolve() for page in PAGES if ROOT / "docs" in page.parents} <= linked
