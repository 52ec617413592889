"""One of several API processes that share a port: `python -m quire.server.process.worker`.

It reads a `WorkerConfig` from standard input, attaches to the supervisor's engine, and serves until
a signal arrives or the supervisor is gone. On standard output it writes "alive" every second, and
"ready" once.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import msgspec

from quire.engine.process.client import EngineClient
from quire.server.app import build_app
from quire.server.args import ServerArgs
from quire.server.process.listen import bind_all, tls_context
from quire.server.process.uvicorn_server import serve
from quire.server.telemetry import logs
from quire.system import end_with

_ALIVE_SECONDS = 1.0
READY_LINE = b"ready\n"


class WorkerConfig(msgspec.Struct):
    """Configuration of a worker, sent by its supervisor.

    Attributes:
        args: the server's settings.
        engines: addresses of the engines' sockets.
        fds: listening sockets that all workers share; empty: bind new ones to the ports in `args`.
        limits: path of the file with the keys' rate limits.
        owner: process id of the supervisor.
    """

    args: ServerArgs
    engines: list[str]
    fds: list[int]
    limits: str
    owner: int


def main() -> None:
    import uvloop  # Not available on every platform, and needed only here.

    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerConfig)
    end_with(config.owner)
    logs.configure(config.args)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config))


async def _serve(config: WorkerConfig) -> None:
    alive_reports = asyncio.create_task(_report_alive())
    client = await EngineClient.attach(*config.engines)
    try:
        app = build_app(client, config.args, Path(config.limits))
        tls = tls_context(config.args)
        shared = [socket.socket(fileno=fd) for fd in config.fds]
        sockets = shared or bind_all(config.args, shared=True)
        await serve(app, sockets, tls, config.args, lambda: _write_line(READY_LINE))
    finally:
        alive_reports.cancel()
        await client.shutdown()


async def _report_alive() -> None:
    """Writes a line every second, which shows the supervisor that the event loop is running."""
    while True:
        _write_line(b"alive\n")
        await asyncio.sleep(_ALIVE_SECONDS)


def _write_line(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
