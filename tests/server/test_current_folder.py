"""Files of the current folder, which may be a downloaded model, are never run."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

import quire
from quire.__main__ import leave_current_folder
from tests.fork_server import BARE
from tests.server.server_process import start_server

SOURCE = Path(quire.__file__).parent
NAMES = (
    "argparse", "ast", "asyncio", "colorsys", "dataclasses", "dis", "hashlib", "inspect", "json",
    "msgspec", "numpy", "random", "select", "tempfile", "torch", "typing", "uuid",
)  # fmt: skip
"""Modules that Quire imports, of the standard library and others."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder of files with the names of modules, which leave a trace when they run."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})"
        )
    return tmp_path


def bare() -> dict[str, str]:
    """Returns variables with which processes start from a bare interpreter, and find Quire."""
    return {BARE: "1", "PYTHONPATH": str(SOURCE.parent)}


def test_a_command_and_its_engine_run_no_file_of_the_current_folder(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quire", "generate", "Once", "--max-tokens=2", "--device=cpu"],
        cwd=folder, env={**os.environ, **bare()}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not (folder / "ran").exists()


def test_a_servers_processes_run_no_file_of_the_current_folder(folder: Path) -> None:
    flags = ["--tensor-parallel-size=2", "--api-workers=2"]
    server = start_server(*flags, variables=bare(), folder=folder)
    try:
        with urllib.request.urlopen(f"{server.url}/v1/models") as answer:
            assert answer.status == 200
    finally:
        server.stop()
    assert not (folder / "ran").exists()


def test_processes_started_in_quires_folder_can_import_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for folder, found in ((str(SOURCE.parent), f"{SOURCE.parent}:/other"), ("/", "/other")):
        monkeypatch.setenv("PYTHONPATH", "/other")
        monkeypatch.setattr(sys, "path", [folder, "/other"])
        leave_current_folder()
        assert (sys.path, os.environ["PYTHONPATH"]) == (["/other"], found)


def test_every_process_of_python_is_started_in_one_way() -> None:
    starts = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if "sys.executable" in path.read_text()
    }
    assert starts == {"system.py"}
