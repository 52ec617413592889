"""`quire serve`."""

from __future__ import annotations

import json
import logging

import typer
from rich.console import Console

from quire.cli.progress import progress_bar
from quire.config import EngineArgs
from quire.server.args import ServerArgs
from quire.server.run import run_server


def serve(engine: EngineArgs, server: ServerArgs) -> None:
    """Runs the server, and says where it is and how to try it once it is ready."""
    logging.basicConfig(
        level=server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.root.level))
    if server.access_log:
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)

    def on_ready(url: str, model: str) -> None:
        key = ' -H "Authorization: Bearer $KEY"' if server.api_key else ""
        body = {"messages": [{"role": "user", "content": "Hello!"}], "stream": True}
        typer.echo(f"Serving {model} at {url}. Ctrl-C stops it. Try:\n")
        typer.echo(
            f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n"
            f"    -d '{json.dumps(body)}'\n"
        )

    with progress_bar(Console(stderr=True)) as on_progress:
        run_server(engine, server, on_ready=on_ready, on_progress=on_progress)
