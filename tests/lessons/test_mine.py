"""The engine that the lessons build, and the pages that show it."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lessons import mine, pages
from lessons.__main__ import folders
from quire.models import resolve_model_path

ROOT = Path(__file__).parents[2]
FILE = ROOT / "lessons" / "mine.py"
PAGES = [ROOT / "lessons" / folder / "README.md" for folder in folders().values()]


@pytest.fixture(scope="module")
def model() -> mine.Model:
    return mine.Model(resolve_model_path(None))


def prompts(count: int) -> list[list[int]]:
    """Returns prompts of which some begin alike."""
    rng = torch.Generator().manual_seed(0)
    common = torch.randint(0, 5000, (40,), generator=rng).tolist()
    sizes = torch.randint(1, 30, (count,), generator=rng).tolist()
    return [
        common[: 20 * (i % 3)] + torch.randint(0, 5000, (size,), generator=rng).tolist()
        for i, size in enumerate(sizes)
    ]


def texts(engine: mine.Engine, length: int = 8) -> list[list[int]]:
    """Returns what an engine writes after the prompts, two waves of them."""
    found = []
    for wave in range(2):
        requests = [
            mine.Request(f"{wave}-{i}", ids, len(ids) + length, mine.Sample(i))
            for i, ids in enumerate(prompts(9))
        ]
        for request in requests:
            engine.add(request)
        engine.run()
        found += [request.tokens for request in requests]
    return found


def test_it_imports_nothing_of_quire() -> None:
    assert not re.search(r"^(?:import|from) quire", FILE.read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_pages_show_the_files(page: Path) -> None:
    """`python -m lessons.pages` writes the code again where it differs."""
    text = page.read_text("utf-8")
    assert text == pages.filled(page)
    assert text.count("```python") == len(pages.BLOCK.findall(text)), "code without a piece's name"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_a_page_shows_its_whole_section(page: Path) -> None:
    """Whoever types what the pages show, in their order, has the file."""
    section = pages.sections(FILE.read_text("utf-8"))[int(page.parent.name[:2])]
    assert pages.shown(page) == pages.dense(section)


def test_every_lesson_has_a_file_that_runs(tmp_path: Path) -> None:
    """`python -m lessons mine N` prints a file that needs nothing of later lessons."""
    for number in folders():
        file = tmp_path / f"after_{number}.py"
        file.write_text(pages.until(number), "utf-8")
        runpy.run_path(str(file), run_name=file.stem)
    assert pages.until(13) == FILE.read_text("utf-8")
    assert "class Blocks" in pages.until(3)
    assert "class Engine" not in pages.until(3)


def test_texts_depend_on_no_cache_and_no_budget(model: mine.Model) -> None:
    expected = texts(mine.Engine(model, mine.PagedCache(model, count=64), most=1))
    small = mine.PrefixCache(model, count=16, size=8)  # too small to keep all prompts
    for engine in (
        mine.Engine(model, mine.PagedCache(model, count=12), budget=20),
        mine.Engine(model, mine.PrefixCache(model, count=64, size=4)),
        mine.Engine(model, small, budget=50),
    ):
        assert texts(engine) == expected
        assert not engine.cache.tables
    held = set(small.known.values())
    assert len(held) == len(small.known)
    assert sorted([*small.free, *held]) == list(range(16))


def test_drafts_change_no_text(model: mine.Model) -> None:
    draft = mine.Model(resolve_model_path(None).with_name("quire-tiny-draft"))
    expected = texts(mine.Engine(model, mine.PagedCache(model, count=64)))
    engine = mine.DraftEngine(model, mine.PrefixCache(model, count=24), draft, budget=40)
    assert texts(engine) == expected
    assert 0 < engine.accepted < engine.drafted
    assert not engine.drafters


def test_a_request_that_waits_can_be_removed(model: mine.Model) -> None:
    engine = mine.Engine(model, mine.PagedCache(model, count=4), most=1)
    first, second = (mine.Request(name, [1, 2, 3], 8) for name in "ab")
    engine.add(first)
    engine.add(second)
    engine.step()
    engine.remove(second)
    engine.remove(first)
    assert not engine.waiting
    assert not engine.running
    assert sorted(engine.cache.free) == [0, 1, 2, 3]


def test_lessons_run_a_file_of_the_reader(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(pages.until(1).replace("logits.argmax()", "logits.argmin()"), "utf-8")
    command = [sys.executable, "-m", "lessons", "1", "--tokens", "4", "--mine", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "FAILS: 0 of 4 greedy tokens are the engine's" in done.stdout
    command[3] = "2"
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.endswith("the file has no Cache yet\n")
    command[-1] = str(tmp_path / "none.py")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no such Python file" in done.stderr
