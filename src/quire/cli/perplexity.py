"""`quire eval perplexity`: how well a model predicts a text."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from quire.cli.help import AsJson
from quire.cli.progress import amount_bar, progress_bar
from quire.cli.settings import with_settings
from quire.config import EngineArgs
from quire.tools.evaluate import Perplexity, measure_perplexity


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
        typer.Option(
            help="Tokens that the model reads at once. Default: 2048, or its context if shorter."
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(help="Tokens from the start of a window to the next. Default: --window."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Tokens of the text to read. Default: all.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Prints the figures to standard output."""
    console = Console(stderr=True)
    with progress_bar(console) as on_start, amount_bar(console, "Windows") as on_window:
        found = measure_perplexity(
            engine, data, base=base, window=window, stride=stride, limit=limit,
            on_start=on_start, on_window=on_window,
        )  # fmt: skip
    typer.echo(dumps(found.as_dict(), indent=2) if json else _text(found))


def _text(found: Perplexity) -> str:
    lines = [
        f"tokens         {found.tokens}",
        f"nats           {found.nats:.6f}",
        f"bits per byte  {found.bits_per_byte:.6f}",
        f"perplexity     {found.perplexity:.4f}",
    ]
    if found.base is not None:
        change = 100 * (found.perplexity / found.base.perplexity - 1)
        lines += [
            f"base           {found.base.perplexity:.4f}",
            f"change         {change:+.3f} %",
            f"KL to base     {found.kl:.6f}",
        ]
    return "\n".join(lines)
