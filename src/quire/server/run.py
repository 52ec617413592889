"""The server process: bind, launch the engine, serve, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn

from quire.config import EngineArgs
from quire.errors import ConfigError
from quire.server.app import build_app
from quire.server.args import ServerArgs

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
    sock = bind(server_args.host, server_args.port)
    with contextlib.closing(sock), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(engine_args, server_args, sock, on_ready, on_progress))


async def _serve(
    engine_args: EngineArgs,
    server_args: ServerArgs,
    sock: socket.socket,
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
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=server_args.access_log,
            server_header=False,
            timeout_graceful_shutdown=max(1, round(server_args.drain_timeout)),
        )
        server = _Server(config)
        _warn_if_open(server_args)
        if on_ready is not None:
            server.on_started = lambda: on_ready(url_of(sock), app.state.server.model_name)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, server.handle_exit, number, None)
        await server.serve(sockets=[sock])
    finally:
        await client.shutdown()


class _Server(uvicorn.Server):
    """uvicorn's server, whose signals are handled by `_serve`: uvicorn would raise them again once
    it has stopped, and so never let the process end with status 0."""

    on_started: Callable[[], None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.on_started is not None:
            self.on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: connections are refused until the engine is ready.

    Raises:
        ConfigError: naming what is wrong with the address.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"host {host!r} is no address: {error.strerror}", "host") from None
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", "port") from None
    return sock


def url_of(sock: socket.socket) -> str:
    """Where to reach a bound socket from this machine."""
    host, port = sock.getsockname()[:2]
    address: Any = ipaddress.ip_address(host.partition("%")[0])
    if address.is_unspecified:
        host = "localhost"
    elif address.version == 6:
        host = f"[{host}]"
    return f"http://{host}:{port}"


def _warn_if_open(args: ServerArgs) -> None:
    if args.api_key:
        return
    try:
        local = ipaddress.ip_address(args.host).is_loopback
    except ValueError:
        local = args.host == "localhost"
    if not local:
        logger.warning("%s can be reached by other machines and no --api-key is set", args.host)
