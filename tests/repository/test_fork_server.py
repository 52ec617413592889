"""Processes forked by tests behave like processes started by users."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.fork_server import BARE, ForkedProcess


@pytest.mark.parametrize("arguments", [["serve", "--nonsense"], ["info", "--help"]], ids=str)
def test_a_fork_prints_the_same_as_a_start(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "quire", *arguments]
    forked, started = (
        subprocess.run(command, capture_output=True, text=True, env={**os.environ, **more})
        for more in ({}, {BARE: "1"})
    )
    assert forked.stdout + forked.stderr
    assert vars(forked) == vars(started)


@pytest.mark.skipif(subprocess.Popen is not ForkedProcess, reason="processes are not forked")
def test_a_fork_is_a_child_with_pipes_and_a_session_of_its_own() -> None:
    # A machine that waits for its engine.
    flags = ["--node-rank=1", "--nnodes=2", "--pipeline-parallel-size=2", "--master-port=9"]
    command = [sys.executable, "-m", "quire", "serve", "--device=cpu", *flags]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", start_new_session=True
    ) as process:
        assert os.getsid(process.pid) == process.pid
        assert os.readlink(f"/proc/{process.pid}/cwd") == "/"
        with open(f"/proc/{process.pid}/cmdline") as file:
            assert file.read().rstrip("\0").split("\0") == command
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
