"""A server's start, stop and death."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from quire.server.app import build_app
from quire.server.args import ServerArgs
from quire.server.process import supervisor
from quire.server.process.supervisor import Supervisor
from tests.fork_server import BARE
from tests.server.fakes import FakeClient
from tests.server.inprocess import PROMPT, assert_error, run
from tests.server.server_process import MODEL, WAIT, Server

LONG: dict[str, Any] = {
    "model": MODEL,
    "prompt": "Once",
    "max_tokens": 1500,
    "extra_body": {"ignore_eos": True},
}


def engines(server: Server) -> list[int]:
    """Returns the processes of the server's engine."""
    command = ["pgrep", "-P", str(server.process.pid), "-f", "quire.engine.process.process"]
    listing = subprocess.run(command, capture_output=True, text=True)
    return [int(pid) for pid in listing.stdout.split()]


def health(server: Server) -> int:
    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize(("number", "bare"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_a_signal_drains_and_exits_with_0(
    launch: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, number: int, bare: bool
) -> None:
    """This includes processes started from the command line."""
    if bare:
        monkeypatch.setenv(BARE, "1")
    server = launch("--drain-timeout", str(WAIT))
    stream = iter(server.client().completions.create(**{**LONG, "max_tokens": 80}, stream=True))
    next(stream)
    below = engines(server)
    assert below
    server.process.send_signal(number)
    chunks = list(stream)  # running requests may finish
    assert chunks[-1].choices[0].finish_reason == "length"
    assert server.process.wait(WAIT) == 0
    server.wait_for(lambda: not any(map(_alive, below)), "the engine to end")
    server.wait_for(lambda: "Stopped. Goodbye." in "".join(server.output), "its last words")
    assert "Traceback" not in "".join(server.output)


def test_drain_timeout(launch: Callable[..., Server]) -> None:
    server = launch("--drain-timeout", "1")
    stream = iter(
        server.client().completions.create(**{**LONG, "n": 32, "max_tokens": 2000}, stream=True)
    )
    next(stream)
    assert server.stop() == 0
    with pytest.raises(openai.APIError, match="The server is stopping") as caught:
        list(stream)
    assert caught.value.code == "stopping"
    assert "Traceback" not in "".join(server.output)


def test_a_draining_server_refuses_requests_on_open_connections() -> None:
    async def go() -> None:
        app = build_app(FakeClient(), ServerArgs())  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            app.state.server.draining = True
            answer = await http.post("/v1/completions", json=PROMPT)
            assert_error(answer, 503, None, "stopping")
            assert "retry-after" in answer.headers
            assert (await http.get("/health")).status_code == 200

    run(go())


def test_a_worker_that_shows_no_life_is_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lines = "import time\nfor _ in range(5): print('alive', flush=True); time.sleep(0.05)\n"

    async def watched(code: str) -> int:
        worker = await asyncio.create_subprocess_exec(
            sys.executable, "-c", lines + code, stdout=asyncio.subprocess.PIPE
        )
        return await Supervisor._watch(object.__new__(Supervisor), worker, 1, ready)

    ready = asyncio.Event()
    assert run(watched("raise SystemExit(3)")) == 3
    assert not ready.is_set()
    assert run(watched("print('ready')")) == 0
    assert ready.is_set()
    monkeypatch.setattr(supervisor, "SILENCE_SECONDS", 0.2)
    assert run(watched("time.sleep(600)")) == -signal.SIGKILL
    assert "has not responded for 0.2 s" in caplog.text
    # A process that stalls before its first line.
    monkeypatch.setattr(supervisor, "START_SECONDS", 0.3)
    lines = "import time\n"
    assert run(watched("time.sleep(600)")) == -signal.SIGKILL
    assert "has not responded for 0.3 s" in caplog.text


def test_a_worker_that_is_stopped_at_its_start_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first of the processes stalls, and the second serves."""
    code = (
        "import pathlib, sys, time\n"
        f"place = pathlib.Path({str(tmp_path / 'once')!r})\n"
        "if not place.exists(): place.touch(); time.sleep(600)\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    monkeypatch.setattr(supervisor, "python_command", lambda name: [sys.executable, "-c", code])
    monkeypatch.setattr(supervisor, "START_SECONDS", 3.0)
    monkeypatch.setattr(supervisor, "_PAUSE", 0.01)

    async def go() -> None:
        host = SimpleNamespace(folder=tmp_path, address="a")
        client: Any = SimpleNamespace(host=host, replicas=[SimpleNamespace(host=host)])
        with socket.create_server(("127.0.0.1", 0)) as sock:
            running = Supervisor(client, ServerArgs(api_workers=1), [sock])
            serving = asyncio.create_task(running.run(running._stop))
            await asyncio.wait_for(serving, WAIT)

    run(go())


def test_engine_death(launch: Callable[..., Server]) -> None:
    server = launch()
    client = server.client()
    stream = iter(client.completions.create(**LONG, stream=True))
    next(stream)
    waiting: list[Exception] = []

    def wait_whole() -> None:
        try:
            client.completions.create(**LONG)
        except openai.APIStatusError as error:
            waiting.append(error)

    thread = threading.Thread(target=wait_whole)
    thread.start()
    server.wait_for(lambda: server.metric("quire_requests_running") == 2, "both requests")
    for engine in engines(server):
        os.kill(engine, signal.SIGKILL)
    with pytest.raises(openai.APIError) as error:
        list(stream)
    assert error.value.code == "engine_dead"
    thread.join(WAIT)
    assert [getattr(error, "status_code", None) for error in waiting] == [503]
    server.wait_for(lambda: health(server) == 503, "health to say so")
    with pytest.raises(openai.InternalServerError) as later:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "?"}])
    assert later.value.status_code == 503
    assert server.stop() == 0


def test_api_death_ends_the_engine(launch: Callable[..., Server]) -> None:
    server = launch()
    below = engines(server)
    server.process.kill()
    server.process.wait(WAIT)

    def gone() -> bool:
        return not any(_alive(pid) for pid in below)

    assert below
    server.wait_for(gone, "the engine to notice")
    assert gone()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_key(launch: Callable[..., Server]) -> None:
    server = launch("--api-key", "sesame", "--api-key", "open")
    assert health(server) == 200
    with pytest.raises(openai.AuthenticationError):
        server.client().models.list()
    for key in ("sesame", "open"):
        client = server.client(api_key=key)
        assert client.completions.create(model=MODEL, prompt="a", max_tokens=1).choices
    assert server.stop(signal.SIGINT) == 0


def test_taken_port_is_one_line(server: Server) -> None:
    port = server.url.rpartition(":")[2]
    done = subprocess.run(
        [sys.executable, "-m", "quire", "serve", "--port", port], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"quire: cannot listen on 127.0.0.1:{port}")
    assert len(done.stderr.splitlines()) == 1
