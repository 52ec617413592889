"""The serving of an application on a bound socket by uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from quire.server.args import ServerArgs
from quire.server.process.http_protocol import BoundedHttpProtocol

if TYPE_CHECKING:
    from fastapi import FastAPI


async def serve(
    app: FastAPI,
    sock: socket.socket,
    tls: ssl.SSLContext | None,
    args: ServerArgs,
    on_started: Callable[[], None],
) -> None:
    """Serves until SIGINT or SIGTERM, and until running requests have ended or `drain_timeout` is
    over.

    A second signal does not wait for them. SIGHUP reads the key file again.
    """
    config = uvicorn.Config(
        app,
        loop="none",
        http=BoundedHttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,  # RequestContextMiddleware has its own
        server_header=False,
        timeout_graceful_shutdown=max(1, round(args.drain_timeout)),
    )
    config.load()
    config.ssl = tls
    server = _Server(config, app, on_started)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.handle_exit, number, None)
    loop.add_signal_handler(signal.SIGHUP, app.state.server.keys.reload)
    try:
        await server.serve(sockets=[sock])
    finally:
        if app.state.server.tracing is not None:
            await asyncio.to_thread(app.state.server.tracing.close)


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handling, which `serve` does.

    uvicorn would raise signals again once it has stopped, and so never let the process end with
    status 0.
    """

    def __init__(
        self, config: uvicorn.Config, app: FastAPI, on_started: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._app_state = app.state
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._app_state.server.draining = True
        snapshots = getattr(self._app_state, "live_snapshots", None)
        if snapshots is not None:
            snapshots.close()
        self.force_exit = self.should_exit
        self.should_exit = True
