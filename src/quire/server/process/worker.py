"""One of several API processes that share a port: `python -m quire.server.process.worker`.

Reads a `WorkerConfig` from standard input, attaches to the engine that the supervisor has started,
and serves until it is told to stop or its supervisor is gone. On standard output it says "alive"
every second, and once "ready".
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
from quire.server.process.listen import bind, tls_context
from quire.server.process.uvicorn_server import serve
from quire.server.telemetry import logs
from quire.system import end_with

_LIFE_SECONDS = 1.0
READY_LINE = b"ready\n"


class WorkerConfig(msgspec.Struct):
    """Configuration of a worker, sent by its supervisor.

    Attributes:
        engines: addresses of the engines' sockets.
        fd: a listening socket that all workers share; None binds an own one to the port in `args`.
        limits: file of the keys' rate limits.
        owner: process id of the supervisor.
    """

    args: ServerArgs
    engines: list[str]
    fd: int | None
    limits: str
    owner: int


def main() -> None:
    import uvloop

    share = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerConfig)
    end_with(share.owner)
    logs.configure(share.args)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_work(share))


async def _work(share: WorkerConfig) -> None:
    living = asyncio.create_task(_show_life())
    client = await EngineClient.attach(*share.engines)
    try:
        app = build_app(client, share.args, Path(share.limits))
        tls = tls_context(share.args)
        sock = bind(share.args, shared=True) if share.fd is None else socket.socket(fileno=share.fd)
        await serve(app, sock, tls, share.args, lambda: _say(READY_LINE))
    finally:
        living.cancel()
        await client.shutdown()


async def _show_life() -> None:
    """Tells the supervisor that the event loop turns, until the worker ends."""
    while True:
        _say(b"alive\n")
        await asyncio.sleep(_LIFE_SECONDS)


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
