"""The router's process: it binds the socket, runs the event loop and shuts down."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

import uvicorn

from quire.router.app import RouterApp
from quire.router.client_keys import ClientKeys
from quire.router.fleet import Fleet, FleetSettings
from quire.router.proxy import Proxy
from quire.router.replica import Role
from quire.router.sockets import SocketProxy
from quire.router.telemetry import RouterMetrics
from quire.server.args import ServerArgs
from quire.server.http.hosts import HostCheck
from quire.server.http.websocket import MAX_MESSAGE, WEBSOCKETS
from quire.server.process.listen import bind, url_of
from quire.server.process.uvicorn_server import BoundedHttpProtocol
from quire.server.telemetry.tracing import Exporter


@dataclass(frozen=True)
class RouterArgs:
    """Settings of a router.

    Attributes:
        replicas: addresses of the servers, each with its role.
        fleet: settings of the fleet.
        host: address to listen on.
        port: port to listen on.
        admin_key: see `RouterApp`.
        keys: see `RouterApp`.
        hosts: see `RouterApp`.
        public_metrics: see `RouterApp`.
        max_body_mb: largest request body, in MB.
        max_body_memory_mb: memory of all bodies while they arrive, in MB.
        drain_timeout: seconds in which running requests may finish after a signal to stop.
        otlp_endpoint: URL of an OpenTelemetry collector; None sends no traces.
    """

    replicas: Sequence[tuple[str, Role]]
    fleet: FleetSettings
    host: str = "127.0.0.1"
    port: int = 8080
    admin_key: str | None = None
    keys: ClientKeys | None = None
    hosts: HostCheck | None = None
    public_metrics: bool = False
    max_body_mb: float = 16.0
    max_body_memory_mb: float = 256.0
    drain_timeout: float = 30.0
    otlp_endpoint: str | None = None


def run_router(args: RouterArgs, on_ready: Callable[[str], None]) -> None:
    """Routes requests until SIGINT or SIGTERM.

    After the signal, running requests have `drain_timeout` seconds to finish.

    Args:
        on_ready: called with the router's URL once it accepts requests.

    Raises:
        ConfigError: the address is taken, or a replica's address is invalid.
    """
    import uvloop  # Not available on every platform, and needed only here.

    sock = bind(ServerArgs(host=args.host, port=args.port))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_route(args, sock, on_ready))


def build_router(
    fleet: Fleet,
    admin_key: str | None,
    max_body_bytes: int,
    max_body_memory_bytes: int = 256_000_000,
    exporter: Exporter | None = None,
    keys: ClientKeys | None = None,
    hosts: HostCheck | None = None,
    *,
    public_metrics: bool = False,
) -> RouterApp:
    """Returns the router's application for a fleet.

    Args:
        fleet: the replicas.
        admin_key: see `RouterApp`.
        max_body_bytes: see `Proxy`.
        max_body_memory_bytes: see `Proxy`.
        exporter: see `Proxy`.
        keys: see `RouterApp`.
        hosts: see `RouterApp`.
        public_metrics: see `RouterApp`.
    """
    metrics = RouterMetrics(fleet)
    proxy = Proxy(fleet, metrics, max_body_bytes, max_body_memory_bytes, exporter)
    sockets = SocketProxy(fleet, metrics, keys)
    return RouterApp(fleet, proxy, sockets, metrics, admin_key, keys, hosts, public_metrics)


async def _route(args: RouterArgs, sock: socket.socket, on_ready: Callable[[str], None]) -> None:
    fleet, exporter = Fleet(args.fleet), None
    if args.otlp_endpoint is not None:
        exporter = Exporter(args.otlp_endpoint, "quire-router")
    try:
        for url, role in args.replicas:
            fleet.join(url, role)
        sizes = int(args.max_body_mb * 1e6), int(args.max_body_memory_mb * 1e6)
        app = build_router(
            fleet,
            args.admin_key,
            *sizes,
            exporter,
            args.keys,
            args.hosts,
            public_metrics=args.public_metrics,
        )
        config = uvicorn.Config(
            app,
            loop="none",
            http=BoundedHttpProtocol,
            **{**WEBSOCKETS, "ws_max_size": min(MAX_MESSAGE, sizes[0])},
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=int(args.drain_timeout),
        )
        url = url_of(sock, ServerArgs())
        server = _RouterServer(config, lambda: on_ready(url))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, server.handle_exit, number, None)
        if args.keys is not None:
            loop.add_signal_handler(signal.SIGHUP, args.keys.reload)
        await server.serve(sockets=[sock])
    finally:
        await fleet.close()
        if args.keys is not None:
            args.keys.close()
        if exporter is not None:
            await asyncio.to_thread(exporter.close)


class _RouterServer(uvicorn.Server):
    """uvicorn's server without its signal handling, which would raise signals again at its end."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
