"""Applies the changes of docs/adding-a-sampling-parameter.md: the page's tests pass."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import quire

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "adding-a-sampling-parameter.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def apply_change(change: str, folder: Path) -> str:
    """Makes one of the page's changes in a copy of the repository. Returns the file's name."""
    first, _, hunks = change.partition("\n")
    name = first.removeprefix("--- ")
    text = (folder / name).read_text()
    for hunk in hunks.split("@@\n"):
        lines = [line or " " for line in hunk.removesuffix("\n").split("\n")]
        old = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
        new = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
        assert text.count(old) == 1, f"{name} has changed: the page shows\n{old}"
        text = text.replace(old, new)
    (folder / name).write_text(text)
    return name


def test_from_nothing_to_its_own_tests(tmp_path: Path) -> None:
    source, copy = Path(quire.__file__).parent, tmp_path / "src" / "quire"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "embedded"))
    (copy / "embedded").symlink_to(source / "embedded")
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "api.md", tmp_path / "docs")
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "parameter_table.py", tmp_path / "tools")
    assert [apply_change(change, tmp_path) for change in blocks("diff")] == [
        "src/quire/sampling_params.py",
        "src/quire/features/samplers/hook.py",
    ], "the declaration, and what does it"
    (code,) = blocks("python")
    (tmp_path / "test_page.py").write_text(code)
    search = os.pathsep.join(str(path) for path in (tmp_path / "src", ROOT))
    env = {**os.environ, "PYTHONPATH": search, "PYTHONDONTWRITEBYTECODE": "1"}

    def python(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "6 passed" in python("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_page.py")
    python("tools/parameter_table.py")
    assert "| `top_n_sigma` | 0.0 | 0 to 100 |" in (tmp_path / "docs" / "api.md").read_text()
