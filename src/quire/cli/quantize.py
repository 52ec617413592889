"""`quire quantize`: a quantized checkpoint of a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import typer
from rich.console import Console

from quire.cli.progress import amount_bar, counted
from quire.errors import ConfigError
from quire.models import resolve_model_path
from quire.tools.quantize import Options, Recipe
from quire.tools.quantize import quantize as make


def quantize(
    model: str | None, revision: str | None, out: Path, recipe: Recipe, options: Options
) -> None:
    """Prints what the quantized model lost, and where it and its report are."""
    folder = resolve_model_path(model, revision)
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device != "cpu":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if device not in ("cuda", *(f"cuda:{index}" for index in range(count))) or not count:
            raise ConfigError(
                f"device {device!r} is not there: found {counted(count, 'GPU')}", "device"
            )
    with amount_bar(Console(stderr=True), "Layers") as on_block:
        options = replace(options, device=device, on_block=on_block)
        report = make(folder, model or folder.name, out, recipe, options)
    typer.echo(
        f"perplexity {report.perplexity_before:.4f} -> {report.perplexity_after:.4f} "
        f"({report.change:+.2f} %), KL {report.kl:.6f}; "
        f"{report.bytes_before / 1e6:.1f} -> {report.bytes_after / 1e6:.1f} MB: {out}"
    )
