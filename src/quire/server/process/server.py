"""Entry point of the server: it binds, launches the engine, serves, drains and stops."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
from collections.abc import Callable

from quire.config import EngineArgs, EngineConfig
from quire.engine.process.client import EngineClient
from quire.errors import ConfigError
from quire.server.apis.batch.service import open_store
from quire.server.apis.batch.store import BatchStore
from quire.server.app import build_app
from quire.server.args import ServerArgs
from quire.server.process.listen import (
    bind_all,
    closing_sockets,
    tls_context,
    url_of,
    warn_if_open,
)
from quire.server.process.supervisor import Supervisor
from quire.server.process.uvicorn_server import serve

logger = logging.getLogger("quire.server")

OnReady = Callable[[str, str, EngineConfig], None]
"""Called with the server's URL and the model's name once requests are answered."""


def run_server(
    engine_args: EngineArgs,
    server_args: ServerArgs,
    *,
    on_ready: OnReady | None = None,
    on_progress: Callable[..., None] | None = None,
) -> None:
    """Serves until SIGINT or SIGTERM.

    It then refuses new requests, gives running ones `drain_timeout` seconds to finish, and returns.
    A second signal ends it at once.

    Args:
        on_ready: called with the URL, the model's name and the settings once the server answers.
        on_progress: called with the progress of the engine's start.

    Raises:
        ConfigError: the address cannot be bound, or a setting is wrong.
        ModelError: the model cannot be loaded.
    """
    import uvloop  # Not available on every platform, and needed only here.

    if "simulate_acceptance" in (engine_args.speculative or {}):
        raise ConfigError(
            "speculative: simulate_acceptance is for quire bench; its texts mean nothing",
            "speculative",
        )
    engine_args = engine_args.replace(kv_peers=server_args.kv_peers)
    # Loading the model may take minutes. Binding first reports a taken port at once.
    tls = tls_context(server_args)
    sockets = bind_all(server_args)
    if server_args.api_workers > 1 and server_args.uds is None:
        # The exclusive bind above fails if another server has the port. Without it both servers
        # would share the port, and each would get half of the requests.
        for sock in sockets:
            sock.close()
        sockets = bind_all(server_args, shared=True)
    store = open_store(server_args)
    with (
        closing_sockets(sockets, server_args),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_serve(engine_args, server_args, sockets, tls, store, on_ready, on_progress))


async def _serve(
    engine_args: EngineArgs,
    server_args: ServerArgs,
    sockets: list[socket.socket],
    tls: ssl.SSLContext | None,
    batch_store: BatchStore | None,
    on_ready: OnReady | None,
    on_progress: Callable[..., None] | None,
) -> None:
    launching = asyncio.ensure_future(
        EngineClient.launch(
            engine_args,
            on_progress,
            restarts=server_args.engine_restarts,
            replicas=server_args.data_parallel_size,
            stuck_timeout=server_args.stuck_timeout,
        )
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, launching.cancel)
    try:
        client = await launching
    except asyncio.CancelledError:
        return
    try:
        app = build_app(client, server_args, batch_store=batch_store)
        warn_if_open(server_args)

        def ready() -> None:
            for sock in sockets[1:]:
                logger.info("Ollama's API is at %s too", url_of(sock, server_args))
            if on_ready is not None:
                on_ready(
                    url_of(sockets[0], server_args), app.state.server.model_name, client.config
                )

        if server_args.api_workers == 1:
            await serve(app, sockets, tls, server_args, ready)
        else:
            await Supervisor(client, server_args, sockets).run(ready)
    finally:
        await client.shutdown()
