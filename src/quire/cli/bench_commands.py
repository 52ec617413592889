"""The options of `quire bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quire.cli.settings import with_settings
from quire.config import OPTIMIZATIONS, EngineArgs

app = typer.Typer(help="Measure Quire.", no_args_is_help=True)

Output = Annotated[
    Path | None, typer.Option(help="Append the records to this file, one JSON object per line.")
]
Csv = Annotated[Path | None, typer.Option(help="Write the records to this file as CSV.")]
Markdown = Annotated[Path | None, typer.Option(help="Write a table to this file as Markdown.")]
Png = Annotated[
    Path | None, typer.Option(help="Write a picture to this file (needs the extra `plots`).")
]
Cases = Annotated[
    list[str] | None,
    typer.Option(
        help="nano, nano-penalized, b64, b1 (512 tokens out), b1-256, ttft, or requests x prompt x "
        "output tokens, as in 64x512x1024. May be repeated. Default: b1 and b64."
    ),
]
Scale = Annotated[
    float, typer.Option(help="Shrink requests and lengths by this factor, for small machines.")
]
Repeat = Annotated[int, typer.Option(min=1, max=100, help="Runs per case; the best counts.")]

_DEFAULT_CASES = ("b1", "b64")


@app.command("throughput")
@with_settings(EngineArgs)
def throughput(
    *,
    engine: EngineArgs,
    case: Cases = None,
    batch_sweep: Annotated[
        str | None, typer.Option(help="Numbers of requests to run at once, as in 1,2,4.")
    ] = None,
    length_sweep: Annotated[
        str | None, typer.Option(help="Prompt lengths to run, as in 128,512,2048.")
    ] = None,
    sweep_rows: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Requests of the length sweep.")
    ] = 64,
    sweep_input_len: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Prompt tokens of the batch sweep.")
    ] = 512,
    sweep_output_len: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Output tokens of both sweeps.")
    ] = 256,
    scale: Scale = 1.0,
    repeat: Repeat = 2,
    output: Output = None,
    csv: Csv = None,
    markdown: Markdown = None,
    png: Png = None,
) -> None:
    """Measure the engine through `LLM.generate`, all requests at once."""
    from quire.bench.cases import parse_numbers
    from quire.bench.outputs import Outputs
    from quire.cli import bench

    sizes = (sweep_rows, sweep_input_len, sweep_output_len)
    sweeps = []
    if batch_sweep is not None:
        sweeps.append(bench.Sweep("rows", parse_numbers(batch_sweep, "batch_sweep"), *sizes))
    if length_sweep is not None:
        sweeps.append(bench.Sweep("input_len", parse_numbers(length_sweep, "length_sweep"), *sizes))
    bench.throughput(
        engine,
        cases=case or (() if sweeps else _DEFAULT_CASES),
        sweeps=sweeps,
        scale=scale,
        repeat=repeat,
        outputs=Outputs(output, csv, markdown, png),
    )


@app.command("latency")
@with_settings(EngineArgs)
def latency(
    *,
    engine: EngineArgs,
    input_len: Annotated[str, typer.Option(help="Prompt lengths, as in 128,512,2048.")] = "512",
    output_len: Annotated[str, typer.Option(help="Output lengths, as in 1,128.")] = "128",
    requests: Annotated[
        int, typer.Option(min=1, max=10_000, help="Requests for each pair of lengths.")
    ] = 12,
    output: Output = None,
    csv: Csv = None,
    markdown: Markdown = None,
    png: Png = None,
) -> None:
    """Measure one request at a time: first token, between tokens, whole answer."""
    from quire.bench.cases import parse_numbers
    from quire.bench.outputs import Outputs
    from quire.cli import bench

    bench.latency(
        engine,
        input_lens=parse_numbers(input_len, "input_len"),
        output_lens=parse_numbers(output_len, "output_len"),
        requests=requests,
        outputs=Outputs(output, csv, markdown, png),
    )


@app.command("startup")
@with_settings(EngineArgs)
def startup(
    *,
    engine: EngineArgs,
    cold: Annotated[
        bool, typer.Option("--cold", help="Start each time with an empty Triton cache.")
    ] = False,
    repeat: Repeat = 2,
    timeout: Annotated[
        float, typer.Option(min=1, max=3600, help="Seconds that one start may take.")
    ] = 600.0,
    output: Output = None,
    csv: Csv = None,
    markdown: Markdown = None,
    png: Png = None,
) -> None:
    """Measure from the command to the first token, in fresh processes."""
    from quire.bench.outputs import Outputs
    from quire.cli import bench

    bench.start(
        engine,
        cold=cold,
        repeat=repeat,
        timeout=timeout,
        outputs=Outputs(output, csv, markdown, png),
    )


@app.command("ablation")
@with_settings(EngineArgs)
def ablation(
    *,
    engine: EngineArgs,
    case: Cases = None,
    off: Annotated[
        list[str] | None,
        typer.Option(
            help=f"One of {', '.join(OPTIMIZATIONS)} (may be repeated). Default: all of them."
        ),
    ] = None,
    scale: Scale = 1.0,
    repeat: Repeat = 2,
    output: Output = None,
    csv: Csv = None,
    markdown: Markdown = None,
    png: Png = None,
) -> None:
    """Measure what each optimization brings, by switching it off."""
    from quire.bench.outputs import Outputs
    from quire.cli import bench

    bench.ablation(
        engine,
        cases=case or _DEFAULT_CASES,
        off=list(dict.fromkeys(off or OPTIMIZATIONS)),
        scale=scale,
        repeat=repeat,
        outputs=Outputs(output, csv, markdown, png),
    )


@app.command("scheduler")
def scheduler(output: Output = None) -> None:
    """Measure what a step costs the scheduler."""
    from quire.bench.outputs import Outputs
    from quire.cli import bench

    bench.scheduler(outputs=Outputs(output))
