"""The options of `quire eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quire.cli.help import CommandGroup, SettingsCommand
from quire.cli.settings import with_settings
from quire.config import EngineArgs

app = typer.Typer(cls=CommandGroup, help="Measure how good a model is.", no_args_is_help=True)


@app.command("perplexity", cls=SettingsCommand)
@with_settings(EngineArgs)
def perplexity(
    *,
    engine: EngineArgs,
    data: Annotated[
        Path, typer.Option(metavar="FILE", help="Text in UTF-8; may be compressed (.xz, .gz).")
    ],
    base: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Compare with this model, as its checkpoint stores it."),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(help="Tokens seen at once. Default: 2048, or what the model takes."),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(help="Tokens between the beginnings of windows. Default: a window."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Tokens of the text to read. Default: all.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a model's perplexity over a text, and its divergence from another model."""
    from quire.cli.perplexity import perplexity as run

    run(engine, data, base=base, window=window, stride=stride, limit=limit, as_json=json)
