"""`quire serve`."""

from __future__ import annotations

import json

import typer
from rich.console import Console

from quire.cli.progress import progress_bar
from quire.config import EngineArgs
from quire.server.args import ServerArgs
from quire.server.process.server import run_server
from quire.server.telemetry import logs


def serve(engine: EngineArgs, server: ServerArgs) -> None:
    """Runs the server; once it is ready, prints its address and how to try it."""
    logs.configure(server)

    def on_ready(url: str, model: str) -> None:
        asks = server.api_key or server.api_key_file
        key = ' -H "Authorization: Bearer $KEY"' if asks else ""
        body = {"prompt": "One day, a little fox", "max_tokens": 100, "stream": True}
        typer.echo(f"Serving {model} at {url}. Ctrl-C stops it.\n")
        if server.uds is not None:
            url = f"--unix-socket {server.uds} http://localhost"
        elif server.playground:
            typer.echo(f"Open {url} in a browser, or in another terminal:\n")
        typer.echo(
            f"  curl -N {url}/generate -H 'Content-Type: application/json'{key} \\\n"
            f"    -d '{json.dumps(body)}'\n"
        )

    with progress_bar(Console(stderr=True)) as on_progress:
        run_server(engine, server, on_ready=on_ready, on_progress=on_progress)
