"""The server process: bind, launch the engine, serve, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from quire.config import EngineArgs
from quire.server.app import build_app
from quire.server.args import ServerArgs
from quire.server.connection import Connection
from quire.server.listen import bind, closing, tls_context, url_of, warn_if_open

logger = logging.getLogger("quire.server")

OnReady = Callable[[str, str], None]
"""Called with the server's URL and the model's name once requests are answered."""


def run_server(
    engine_args: EngineArgs,
    server_args: ServerArgs,
    *,
    on_ready: OnReady | None = None,
    on_progress: Callable[..., None] | None = None,
) -> None:
    """Serves until SIGINT or SIGTERM, then stops accepting, lets running requests finish for
    `drain_timeout` seconds, and returns. A second signal does not wait for them.

    Raises:
        ConfigError: the address cannot be bound, or a setting is wrong.
        ModelError: the model cannot be loaded.
    """
    import uvloop

    # Bound before the model is loaded, which may take minutes: a taken port should say so at once.
    tls = tls_context(server_args)
    sock = bind(server_args)
    with closing(sock, server_args), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(engine_args, server_args, sock, tls, on_ready, on_progress))


async def _serve(
    engine_args: EngineArgs,
    server_args: ServerArgs,
    sock: socket.socket,
    tls: ssl.SSLContext | None,
    on_ready: OnReady | None,
    on_progress: Callable[..., None] | None,
) -> None:
    from quire.engine.client import EngineClient

    launching = asyncio.ensure_future(EngineClient.launch(engine_args, on_progress))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, launching.cancel)
    try:
        client = await launching
    except asyncio.CancelledError:
        return
    try:
        app = build_app(client, server_args)
        config = uvicorn.Config(
            app,
            loop="none",
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,  # `visits.py` has its own
            server_header=False,
            timeout_graceful_shutdown=max(1, round(server_args.drain_timeout)),
        )
        config.load()
        config.ssl = tls
        server = _Server(config)
        warn_if_open(server_args)
        if on_ready is not None:
            server.on_started = lambda: on_ready(
                url_of(sock, server_args), app.state.server.model_name
            )
        if server_args.playground:
            server.on_exit = app.state.lookout.close
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, server.handle_exit, number, None)
        loop.add_signal_handler(signal.SIGHUP, app.state.server.keys.reload)
        await server.serve(sockets=[sock])
    finally:
        await client.shutdown()


class _Server(uvicorn.Server):
    """uvicorn's server, whose signals are handled by `_serve`: uvicorn would raise them again once
    it has stopped, and so never let the process end with status 0."""

    on_started: Callable[[], None] | None = None
    on_exit: Callable[[], None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.on_started is not None:
            self.on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.on_exit is not None:
            self.on_exit()
        self.force_exit = self.should_exit
        self.should_exit = True
