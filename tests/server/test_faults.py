"""Faults that a server survives: its engine killed or stopped, a worker killed, and clients that
flood, stall, disconnect and send invalid data. Afterwards every block is free, memory is as before,
and requests are answered."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.server_process import MODEL, WAIT, Server

CONNECTS = int(os.environ.get("QUIRE_FAULT_CONNECTS", "60"))
"""Clients that leave in the middle of a stream; a thousand for a thorough run."""
LONG: dict[str, Any] = {
    "model": MODEL,
    "prompt": "Once",
    "max_tokens": 1500,
    "extra_body": {"ignore_eos": True},
}


def status(server: Server, path: str) -> int:
    try:
        with urllib.request.urlopen(server.url + path, timeout=WAIT) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def child(server: Server, module: str) -> int:
    """Returns one of the server's processes, by the module it runs."""
    found = subprocess.run(
        ["pgrep", "-P", str(server.process.pid), "-f", module], capture_output=True, text=True
    )
    return int(found.stdout.split()[0])


def answers(server: Server) -> bool:
    made = server.client().completions.create(model=MODEL, prompt="a", max_tokens=2)
    return bool(made.choices[0].text)


def memory(server: Server) -> float:
    """Returns the resident megabytes of the server and its engine."""
    total = 0
    for pid in (server.process.pid, child(server, "quire.engine.process.process")):
        total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total / 1e6


def idle(server: Server) -> bool:
    """Returns False also if a connection ends with the process that accepted it."""
    try:
        return (
            server.metric("quire_requests_running") == 0
            and server.metric("quire_requests_waiting") == 0
            and server.metric('quire_kv_blocks{group="0",state="used"}') == 0
        )
    except (OSError, http.client.HTTPException):
        return False


def test_a_killed_engine_is_started_again(launch: Callable[..., Server]) -> None:
    server = launch("--engine-restarts", "1")
    stream = iter(server.client().completions.create(**LONG, stream=True))
    next(stream)
    os.kill(child(server, "quire.engine.process.process"), signal.SIGKILL)
    with pytest.raises(openai.APIError) as error:
        list(stream)
    assert error.value.code == "engine_dead"
    server.wait_for(lambda: status(server, "/ready") == 200, "the engine to be back")
    assert status(server, "/health") == 200
    assert answers(server)
    server.wait_for(lambda: idle(server), "the request to be counted out")
    # One restart was allowed.
    os.kill(child(server, "quire.engine.process.process"), signal.SIGKILL)
    server.wait_for(lambda: status(server, "/health") == 503, "health to say so")
    with pytest.raises(openai.InternalServerError) as later:
        answers(server)
    assert later.value.status_code == 503
    assert int(later.value.response.headers["retry-after"]) >= 1
    assert server.stop() == 0


@pytest.mark.parametrize("workers", ["1", "2"])
def test_an_engine_that_stands_still_is_started_again(
    launch: Callable[..., Server], workers: str
) -> None:
    server = launch("--stuck-timeout", "2", "--engine-restarts", "1", "--api-workers", workers)
    stream = iter(server.client().completions.create(**LONG, stream=True))
    next(stream)
    engine = child(server, "quire.engine.process.process")
    assert status(server, "/ready") == 200
    os.kill(engine, signal.SIGSTOP)
    server.wait_for(lambda: status(server, "/ready") == 503, "/ready to fail")
    with pytest.raises(openai.APIError) as error:
        list(stream)
    assert error.value.code == "engine_dead"
    server.wait_for(lambda: status(server, "/ready") == 200, "the engine to be back")
    assert status(server, "/health") == 200
    assert child(server, "quire.engine.process.process") != engine
    assert "has not turned for 2 s (--stuck-timeout)" in "".join(server.output)
    assert answers(server)


def test_not_ready_while_draining(launch: Callable[..., Server]) -> None:
    server = launch("--drain-timeout", str(WAIT))
    client = server.client()
    stream = iter(client.completions.create(**{**LONG, "max_tokens": 120}, stream=True))
    next(stream)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for(lambda: status(server, "/ready") in (0, 503), "/ready to fail")
    assert [chunk.choices for chunk in stream][-1][0].finish_reason == "length"
    assert server.process.wait(WAIT) == 0


def test_workers(launch: Callable[..., Server]) -> None:
    """Workers share a port and an engine; a killed one is replaced; their metrics are sums."""
    server = launch("--api-workers", "2", "--api-key", "k", "--public-metrics")
    client = server.client(api_key="k")
    ask = {"model": MODEL, "prompt": "a", "max_tokens": 3}
    # Connections are distributed at random; with new ones, both workers get some.
    for seed in range(8):
        with server.client(api_key="k") as fresh:
            fresh.completions.create(**ask, seed=seed, extra_body={"ignore_eos": True})
    # A worker writes its counts down after it has answered.
    server.wait_for(
        lambda: server.metric("quire_generation_tokens_total") == 24, "all tokens to be counted"
    )
    stream = iter(client.completions.create(**{**LONG, "max_tokens": 100}, stream=True))
    next(stream)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_0")
    os.kill(child(server, "quire.server.process.worker"), signal.SIGKILL)
    server.wait_for(lambda: "starting another" in "".join(server.output), "it to be noticed")
    server.wait_for(lambda: idle(server), "what it ran to end")
    for _ in range(6):
        server.wait_for(lambda: status(server, "/ready") == 200, "the other")
    assert server.stop() == 0
    assert "Traceback" not in "".join(server.output)


def open_stream(server: Server, read: int) -> socket.socket:
    """A connection with a long stream on it, of which some bytes are read."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    body = json.dumps(
        {"model": MODEL, "prompt": "a", "max_tokens": 1500, "stream": True, "ignore_eos": True}
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    while read > 0:
        data = connection.recv(min(read, 4096))
        assert data, "the server has closed the connection"
        read -= len(data)
    return connection


def test_clients_that_leave_and_clients_that_stall(launch: Callable[..., Server]) -> None:
    server = launch("--max-num-seqs", "32")
    assert answers(server)
    for _ in range(2):  # buffers grow once
        for connection in [open_stream(server, 600) for _ in range(8)]:
            connection.close()
    server.wait_for(lambda: idle(server), "the first to be gone")
    before = memory(server)
    stalled = [open_stream(server, 300) for _ in range(4)]
    for _ in range(-(-CONNECTS // 10)):
        for connection in [open_stream(server, 300) for _ in range(10)]:
            connection.close()
    assert answers(server)  # while others do not read
    for connection in stalled:
        connection.close()
    server.wait_for(lambda: idle(server), "all to be gone")
    assert memory(server) - before < 60
    assert answers(server)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1" * 400])
def test_invalid_numbers_are_refused_by_field(server: Server, value: str) -> None:
    """Every numeric field is refused by name before anything runs."""
    fields = [
        "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "best_of", "seed", "logprobs",
        "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "priority",
        "prompt_logprobs",
    ]  # fmt: skip
    for field in fields:
        body = f'{{"model": "{MODEL}", "prompt": "a", "{field}": {value}}}'.encode()
        request = urllib.request.Request(
            f"{server.url}/v1/completions", body, {"content-type": "application/json"}
        )
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(request, timeout=10)
        assert error.value.code == 400, field
    assert answers(server)


def test_a_body_that_is_too_large(launch: Callable[..., Server]) -> None:
    server = launch("--max-body-mb", "0.1")
    with pytest.raises(openai.APIStatusError) as error:
        server.client().completions.create(model=MODEL, prompt="a" * 200_000)
    assert error.value.status_code == 413
    assert answers(server)
