"""`quire eval perplexity`: how well a model predicts a text."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from rich.console import Console

from quire.cli.progress import amount_bar, progress_bar
from quire.config import EngineArgs
from quire.tools.evaluate import Perplexity, measure_perplexity


def perplexity(
    engine: EngineArgs,
    data: Path,
    *,
    base: str | None,
    window: int | None,
    stride: int | None,
    limit: int | None,
    as_json: bool,
) -> None:
    """Prints the figures to standard output."""
    console = Console(stderr=True)
    with progress_bar(console) as on_start, amount_bar(console, "Windows") as on_window:
        found = measure_perplexity(
            engine, data, base=base, window=window, stride=stride, limit=limit,
            on_start=on_start, on_window=on_window,
        )  # fmt: skip
    typer.echo(json.dumps(found.as_dict(), indent=2) if as_json else _text(found))


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
