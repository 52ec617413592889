"""Every lesson has its parts, and is in the index."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lessons.__main__ import folders
from lessons.common import Loaded, check, half, table
from quire.models import resolve_model_path

ROOT = Path(__file__).parents[2]
LESSONS = [ROOT / "lessons" / folder for folder in folders().values()]


def signatures(file: Path) -> dict[str, str]:
    """Returns the public functions of a module, and how they are called."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    found = [node for node in ast.parse(file.read_text("utf-8")).body if isinstance(node, kinds)]
    return {
        node.name: f"{ast.unparse(node.args)} -> {node.returns and ast.unparse(node.returns)}"
        for node in found
        if not node.name.startswith("_")
    }


@pytest.mark.parametrize("folder", LESSONS, ids=lambda folder: folder.name)
def test_parts(folder: Path) -> None:
    assert len((folder / "lesson.py").read_text("utf-8").splitlines()) <= 150
    exercises = signatures(folder / "exercises.py")
    solutions = signatures(folder / "solutions.py")
    assert len(exercises) == 3
    assert exercises.items() <= solutions.items()
    assert (folder / "exercises.py").read_text("utf-8").count("NotImplementedError") >= 3


def test_index_links_to_all() -> None:
    index = (ROOT / "lessons" / "README.md").read_text("utf-8")
    assert list(folders()) == list(range(1, 14))
    for folder in LESSONS:
        title = (folder / "README.md").read_text("utf-8").partition("\n")[0].removeprefix("# ")
        assert f"[{title}]({folder.name}/README.md)" in index


def test_list() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lessons"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "  02  The KV cache\n" in done.stdout
    wrong = [sys.executable, "-m", "lessons", "99"]
    done = subprocess.run(wrong, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "no lesson '99': they are 1 to 13\n\n"


def test_a_model_that_is_not_there_ends_all() -> None:
    command = [sys.executable, "-m", "lessons", "all", "--model", "/not/there"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "--model: no such model folder: /not/there\n"
    assert "== 2." not in done.stdout


def test_half_of_a_model_loads(tmp_path: Path) -> None:
    model = Loaded(resolve_model_path(None))
    made = Loaded(half(model, tmp_path))
    assert len(made.decoder.layers) == len(model.decoder.layers) // 2
    assert made.tokenizer.encode("fox").tolist() == model.tokenizer.encode("fox").tolist()
    ours, theirs = made.decoder.layers[-1], model.decoder.layers[len(made.decoder.layers) - 1]
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


def test_a_claim_that_fails_ends_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    check(True, "1 is 1")
    with pytest.raises(SystemExit) as ended:
        check(False, "1 is 2")
    assert ended.value.code == 1
    assert capsys.readouterr().out == "holds: 1 is 1\nFAILS: 1 is 2\n"


def test_table() -> None:
    assert table(["name", "n"], [["a", 1234], ["bc", 0.5]]) == (
        "| name |     n |\n| ---- | ----: |\n| a    | 1,234 |\n| bc   |   0.5 |"
    )
