"""A server whose engine has several ranks, each of which may be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable

import openai
import pytest

from tests.server.server_process import WAIT, Server
from tests.server.test_faults import LONG, answers, child, status


def children(pid: int, module: str) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid), "-f", module], capture_output=True, text=True)
    return [int(each) for each in found.stdout.split()]


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def health(server: Server) -> str:
    """Returns the error of `/health`."""
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(server.url + "/health", timeout=WAIT)
    assert error.value.code == 503
    return str(json.load(error.value)["error"]["message"])


def test_a_killed_rank_ends_all_and_they_start_again(launch: Callable[..., Server]) -> None:
    server = launch("--engine-restarts", "2", "--tensor-parallel-size", "2")
    for victim in ("rank 1", "engine"):
        engine = child(server, "quire.engine.process.process")
        (worker,) = children(engine, "quire.engine.ranks.worker_process")
        stream = iter(server.client().completions.create(**LONG, stream=True))
        next(stream)
        os.kill(worker if victim == "rank 1" else engine, signal.SIGKILL)
        with pytest.raises(openai.APIError) as error:
            list(stream)
        assert error.value.code == "engine_dead"
        if victim == "rank 1":
            assert "the worker of rank 1 has ended (killed by SIGKILL)" in health(server)
        both = (engine, worker)
        server.wait_for(lambda both=both: not any(map(alive, both)), "all ranks to end")
        server.wait_for(lambda: status(server, "/ready") == 200, "the engine to be back")
        assert answers(server)
    assert "the worker of rank 1 has ended (killed by SIGKILL)" in "".join(server.output)
    assert server.stop() == 0
