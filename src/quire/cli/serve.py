"""`quire serve`."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console

from quire.cli.progress import progress_bar
from quire.cli.settings import with_settings
from quire.config import EngineArgs, EngineConfig
from quire.errors import ConfigError, ModelError
from quire.server.args import ServerArgs


@with_settings(EngineArgs, ServerArgs)
def serve(*, engine: EngineArgs, server: ServerArgs) -> None:
    """Runs the server; once it is ready, prints its address and how to try it.

    On every machine but the first it runs that machine's workers instead.

    Raises:
        ModelError: the model cannot be served.
        ConfigError: the address is taken, or a setting is wrong.
    """
    # `quire serve --help` must not import FastAPI.
    from quire.server.process.listen import reachable_urls
    from quire.server.process.server import run_server
    from quire.server.telemetry import logs

    logs.configure(server)
    if engine.node_rank:
        # It imports PyTorch, which a server's own process does without.
        from quire.engine.ranks.nodes import run_node

        run_node(engine)
        return

    def on_ready(url: str, model: str, config: EngineConfig) -> None:
        asks = server.api_key or server.api_key_file
        key = ' -H "Authorization: Bearer $KEY"' if asks else ""
        path, body = sample_request(config)
        typer.echo(f"Serving {model} at {url}. Ctrl-C stops it.\n")
        for address in reachable_urls(url, server.host):
            typer.echo(f"Other machines may reach it at {address}.\n")
        if server.uds is not None:
            url = f"--unix-socket {server.uds} http://localhost"
        elif server.playground:
            typer.echo(f"Open {url} in a browser, or in another terminal:\n")
        typer.echo(
            f"  curl -N {url}{path} -H 'Content-Type: application/json'{key} \\\n"
            f"    -d '{json.dumps(body)}'\n"
        )

    try:
        with progress_bar(Console(stderr=True)) as on_progress:
            run_server(engine, server, on_ready=on_ready, on_progress=on_progress)
    except (ConfigError, ModelError):
        # What the folder lacks is named first, because it would still lack it on another port. Only
        # a failed start checks that here, because the check imports PyTorch.
        check_folder(engine)
        raise
    typer.echo("Stopped. Goodbye.", err=True)


def check_folder(engine: EngineArgs) -> None:
    """Raises ModelError for a model's folder that lacks what the engine would load.

    A hub id passes: the engine fetches it.
    """
    if engine.model is None:
        return
    # They import PyTorch, which a hub's or the small model's server does without.
    from quire.models.config import is_hub_id, load_config, resolve_model_path, spec_from_config
    from quire.models.files import weight_files

    if is_hub_id(engine.model):
        return
    path = resolve_model_path(engine.model)
    spec_from_config(load_config(path))
    if engine.load_format != "dummy":
        weight_files(path)


def sample_request(config: EngineConfig) -> tuple[str, dict[str, Any]]:
    """Returns the route and the body of a request that any model of this kind answers."""
    text = "One day, a little fox"
    if config.task == "generate":
        return "/generate", {"prompt": text, "max_tokens": 100, "stream": True}
    if config.task == "classify" and len(config.labels) == 1:
        return "/score", {"text_1": "Who met the owl?", "text_2": [text]}
    routes = {"embed": "/v1/embeddings", "tokens": "/pooling", "classify": "/classify"}
    return routes[config.task], {"input": text}
