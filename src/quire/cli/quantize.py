"""`quire quantize`: a quantized checkpoint of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from quire.cli.progress import amount_bar, counted
from quire.errors import ConfigError
from quire.models import resolve_model_path
from quire.tools.quantize import Options, Recipe
from quire.tools.quantize import quantize as make


def quantize(
    model: Annotated[
        str | None,
        typer.Argument(help="Model folder or hub id, in 16 or 32 bits.", show_default=False),
    ] = None,
    *,
    method: Annotated[
        str,
        typer.Option(
            help="gptq, awq or rtn (to the nearest): integers of 4 or 8 bits in groups. "
            "smoothquant, int8: 8 bits, inputs of layers too. fp8: 8-bit floats, inputs too."
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to make.")],
    bits: Annotated[
        int | None, typer.Option(help="4 (default) or 8, of gptq, awq and rtn.")
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Inputs that share a scale; -1: all. Default: the largest of 128, 64, 32 and 16 "
            "that divides all layers. fp8: the side of a square block, by default a scale for each "
            "output."
        ),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--asymmetric",
            help="Without a zero for each group, or with one. Default: symmetric; awq has zeros.",
            show_default=False,
        ),
    ] = None,
    weight_only: Annotated[
        bool, typer.Option("--weight-only", help="int8 and fp8: leave inputs of layers alone.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text to calibrate with. Default: one that is built in."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Sequences to calibrate with. Default: 128; for fp8, int8 and rtn 32.",
        ),
    ] = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 512,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="Layer to leave as it is, by name, or re:PATTERN. May be repeated."),
    ] = None,
    gate: Annotated[
        float, typer.Option(help="Most percent that perplexity may rise; else nothing is written.")
    ] = 5.0,
    force: Annotated[bool, typer.Option("--force", help="Write it whatever it lost.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    revision: Annotated[str | None, typer.Option(help="Hub revision of the model.")] = None,
) -> None:
    """Prints what the quantized model lost, and where it and its report are."""
    recipe = Recipe.with_defaults(
        method, bits=bits, group_size=group_size, symmetric=symmetric, weight_only=weight_only
    )
    folder = resolve_model_path(model, revision)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device != "cpu":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if device not in ("cuda", *(f"cuda:{index}" for index in range(count))) or not count:
            raise ConfigError(
                f"device {device!r} is not there: found {counted(count, 'GPU')}", "device"
            )
    with amount_bar(Console(stderr=True), "Layers") as on_block:
        options = Options(
            data=data, samples=samples, length=length, ignore=tuple(ignore or ()), gate=gate,
            force=force, device=device, on_block=on_block,
        )  # fmt: skip
        report = make(folder, model or folder.name, out, recipe, options)
    typer.echo(
        f"perplexity {report.perplexity_before:.4f} -> {report.perplexity_after:.4f} "
        f"({report.change:+.2f} %), KL {report.kl:.6f}; "
        f"{report.bytes_before / 1e6:.1f} -> {report.bytes_after / 1e6:.1f} MB: {out}"
    )
