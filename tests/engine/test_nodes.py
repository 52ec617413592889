"""Engines on several machines, simulated by groups of processes that share only ports."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config import EngineArgs
from quire.engine.builder import resolve
from quire.engine.ranks import nodes
from quire.engine.ranks.nodes import connect, run_node
from quire.errors import ConfigError, EngineDeadError
from tests.tiny_engine import TINY, model_folder


@pytest.fixture(scope="module")
def port() -> int:
    """Returns a port that is free, as is the next one."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            number: int = first.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", number + 1)).close()
            except (OSError, OverflowError):
                continue
            return number


def settings_of(port: int) -> dict[str, Any]:
    return {"pipeline_parallel_size": 2, "nnodes": 2, "master_port": port}


@pytest.fixture(scope="module")
def machine(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the machine without the engine, started as users start it."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings_of(port).items()]
    command = [sys.executable, "-m", "quire", "serve", "--device=cpu", "--node-rank=1", *flags]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    yield process
    process.terminate()
    assert process.wait(timeout=20) == 0


def child_of(process: subprocess.Popen[bytes]) -> int:
    command = ["pgrep", "-P", str(process.pid), "-f", "quire.engine.ranks.worker_process"]
    found = subprocess.run(command, capture_output=True, text=True)
    return int(found.stdout.split()[0])


def test_two_machines(machine: subprocess.Popen[bytes], port: int) -> None:
    """Two machines give the tokens of one. If a machine is lost, the engine ends, and the other
    machine waits for the next engine."""
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True)
    prompts = [f"Page {index} of a book" for index in range(6)]
    found = []
    for settings in ({}, settings_of(port)):
        llm = LLM(device="cpu", max_num_seqs=4, max_model_len=256, num_kv_blocks=32, **settings)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
    timer = threading.Timer(0.5, os.kill, (child_of(machine), signal.SIGKILL))
    timer.start()

    def go_on() -> None:
        for _ in range(10_000):
            llm.generate(prompts, params, use_tqdm=False)

    with pytest.raises(EngineDeadError, match="rank 1, on another machine, has ended"):
        go_on()
    llm.shutdown()
    assert machine.poll() is None


def test_an_engine_that_dies_as_workers_connect(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker connects again if the engine ends before the worker has sent its rank. A worker that
    ends while the engine waits for others does not count."""
    tries: list[int] = []
    with socket.create_server(("127.0.0.1", port)) as server:

        def reset_first(connected: socket.socket) -> None:
            accepted, _ = server.accept()
            tries.append(len(tries))
            if len(tries) == 1:
                # A process that is killed resets what it has not read.
                linger = struct.pack("ii", 1, 0)
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                accepted.close()
            else:
                found[1] = Connection(accepted.detach())

        found: dict[int, Connection] = {}
        monkeypatch.setattr(nodes, "_keep_alive", reset_first)
        monkeypatch.setattr(nodes, "_AGAIN", 0.0)
        pipe = connect("127.0.0.1", port, 1, 0)
        assert tries == [0, 1]
        nodes.drop_ended(found)
        assert found[1].poll(5.0)
        pipe.close()
        nodes.drop_ended(found)
        assert not found


def test_a_worker_that_stalls_in_its_first_message_is_dropped(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "_HELLO", 1)
    config = resolve(EngineArgs(device="cpu", max_model_len=64, **settings_of(port)))
    found: list[Any] = []
    accepting = threading.Thread(
        target=lambda: found.extend(nodes.accept_workers(config, 2, 10.0)), daemon=True
    )
    accepting.start()
    stalled = socket.socket()
    while stalled.connect_ex(("127.0.0.1", port)):
        stalled.close()
        stalled = socket.socket()
    stalled.sendall(b"\0\0")
    pipe = connect("127.0.0.1", port, 1, 0)
    accepting.join(8.0)
    assert not accepting.is_alive()
    stalled.close()
    assert [worker.rank for worker in found] == [1]
    assert pipe.poll(5.0)
    pipe.recv_bytes()
    # The time limit applied only to workers that had not sent their rank.
    assert not found[0]._pipe.poll(2.0)
    pipe.send_bytes(b"x")
    assert found[0]._pipe.recv_bytes() == b"x"
    found[0].stop()
    pipe.close()


def test_workers_of_a_machine_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_LEAVE", 0.0)
    workers = [subprocess.Popen(["sleep", seconds]) for seconds in ("600", "0")]
    nodes.wait_for_end(workers)
    assert workers[0].poll() is None
    workers[0].kill()
    assert [worker.wait() for worker in workers] == [-signal.SIGKILL, 0]


def test_settings_of_machines(tmp_path: Path) -> None:
    folder = str(model_folder(tmp_path, TINY))
    for settings, reason in (
        ({"nnodes": 2}, "nnodes=2: machines hold equal numbers of whole stages"),
        ({"nnodes": 2, "pipeline_parallel_size": 2, "node_rank": 1}, "others run quire serve"),
        ({"node_rank": 1}, r"node_rank=1 must be in \[0, 1\)"),
        ({"nnodes": 2, "pipeline_parallel_size": 2, "master_port": 70000}, "master_port=70000"),
    ):
        args = EngineArgs(model=folder, device="cpu", skip_tokenizer_init=True, **settings)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=reason):
            resolve(args)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match=r"cannot listen at 127\.0\.0\.1"),
    ):
        LLM(device="cpu", **settings_of(taken.getsockname()[1]))
    with pytest.raises(ConfigError, match="is invalid"):
        run_node(EngineArgs(nnodes=2, node_rank=2))
    with pytest.raises(ConfigError, match="1 stages is invalid"):
        run_node(EngineArgs(nnodes=2, node_rank=1, tensor_parallel_size=2))
