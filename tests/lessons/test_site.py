"""The site of docs and lessons: every link resolves, and pages need no network."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lessons.__main__ import folders

ROOT = Path(__file__).parents[2]
LOADED = re.compile(r"<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=\"(https?:[^\"]*)\"")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the site. Warnings, for example about broken links, end the build."""
    pytest.importorskip("material")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    return folder


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    found = {url for page in pages for url in LOADED.findall(page.read_text("utf-8"))}
    assert not found


def test_every_lesson_has_its_page_script_and_exercises(site: Path) -> None:
    for folder in folders().values():
        page = (site / "lessons" / folder / "index.html").read_text("utf-8")
        assert 'id="the-script"' in page
        assert (site / "lessons" / folder / "exercises.py.html").exists()
    assert (site / "lessons" / "02_kv_cache" / "plot.png").exists()


def test_navigation_holds_docs_and_lessons(site: Path) -> None:
    home = (site / "index.html").read_text("utf-8")
    assert "lessons/02_kv_cache/index.html" in home
    assert "docs/kv-cache.html" in home
