"""Folders of processes that were killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from quire.engine import processes
from quire.engine.processes import PREFIX, remove_stale, take_ownership

OWNER = """
import sys
from pathlib import Path
from quire.engine.processes import take_ownership

locks = [take_ownership(Path(folder)) for folder in sys.argv[1:]]
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("place", ["temporary", "memory"])
def test_folders_of_dead_processes_are_removed(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "memory":
        monkeypatch.setattr(processes, "MEMORY", str(tmp_path))
    else:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine, theirs, nobody, old, other = folders = [
        tmp_path / name
        for name in (PREFIX + "a", PREFIX + "b", PREFIX + "c", PREFIX + "d", "another")
    ]
    for folder in folders:
        folder.mkdir()
    # As left by a process in another PID namespace, or by an earlier version.
    (old / "owner").write_text("999999999")
    lock = take_ownership(mine)
    assert lock is not None
    command = [sys.executable, "-c", OWNER, str(theirs), str(other)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        remove_stale()
        assert sorted(tmp_path.iterdir()) == sorted(folders)
        owner.kill()
    remove_stale()
    assert sorted(tmp_path.iterdir()) == sorted([mine, nobody, old, other])
    lock.close()
    remove_stale()
    assert not mine.exists()


def test_a_folder_without_locks_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / (PREFIX + "a")
    folder.mkdir()

    def refuse(*arguments: object) -> None:
        raise OSError(95, "Operation not supported")

    with monkeypatch.context() as patch:
        patch.setattr(processes.fcntl, "flock", refuse)
        assert take_ownership(folder) is None
    remove_stale()
    assert folder.exists()
