"""Folders of processes that were killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from quire.engine import owned_folders
from quire.engine.owned_folders import PREFIX, mark, remove_stale


@pytest.mark.parametrize("place", ["temporary", "memory"])
def test_what_a_dead_process_owns_is_removed(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "memory":
        monkeypatch.setattr(owned_folders, "MEMORY", str(tmp_path))
    else:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, living, nobody, other = (
        tmp_path / name for name in (PREFIX + "a", PREFIX + "b", PREFIX + "c", "another")
    )
    for folder in (dead, living, nobody, other):
        folder.mkdir()
    for folder in (living, other):
        mark(folder)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (dead / "owner").write_text(str(ended.pid))
    (other / "owner").write_text(str(ended.pid))
    remove_stale()
    assert sorted(tmp_path.iterdir()) == [other, living, nobody]
