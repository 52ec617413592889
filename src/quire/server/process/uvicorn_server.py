"""The serving of an application on a bound socket by uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from quire.server.args import ServerArgs
from quire.server.process.http_protocol import BoundedHttpProtocol

if TYPE_CHECKING:
    from fastapi import FastAPI


_SWITCH_SECONDS = 0.0005
"""Time for which a thread keeps the interpreter's lock while another waits for it."""
_LAST_EVENTS_SECONDS = 2.0
"""Time that streams which were not done in time have to send their error."""


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
        timeout_graceful_shutdown=math.ceil(args.drain_timeout + _LAST_EVENTS_SECONDS),
    )
    config.load()
    config.ssl = tls
    server = _Server(config, app, args.drain_timeout, on_started)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.handle_exit, number, None)
    loop.add_signal_handler(signal.SIGHUP, app.state.server.keys.reload)
    try:
        await server.serve(sockets=[sock])
    finally:
        if app.state.batches is not None:
            await app.state.batches.close()
        if app.state.server.tracing is not None:
            await asyncio.to_thread(app.state.server.tracing.close)


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handling, which `serve` does.

    uvicorn would raise signals again once it has stopped, and so never let the process end with
    status 0.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        app: FastAPI,
        drain_timeout: float,
        on_started: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._app_state = app.state
        self._drain_timeout = drain_timeout
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # What stands now stands for good: the collector, which runs while large bodies are decoded,
        # need not walk it again and again.
        gc.collect()
        gc.freeze()
        # The loop asks for the interpreter's lock at every read and write. A thread that parses a
        # large body would keep it for 5 ms each time.
        sys.setswitchinterval(_SWITCH_SECONDS)
        if self._app_state.batches is not None:
            self._app_state.batches.start()
        self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        state = self._app_state.server
        if self._app_state.batches is not None:
            self._app_state.batches.stop()
        if not state.draining:
            state.draining = True
            asyncio.get_running_loop().call_later(self._drain_timeout, state.stop_generations)
        snapshots = getattr(self._app_state, "live_snapshots", None)
        if snapshots is not None:
            snapshots.close()
        self.force_exit = self.should_exit
        self.should_exit = True
