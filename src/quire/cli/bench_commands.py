"""The options of `quire bench`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.help import CommandGroup, SettingsCommand, with_options
from quire.cli.settings import with_settings
from quire.config import OPTIMIZATIONS, EngineArgs
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.tools.bench.record import OutputFiles

app = typer.Typer(cls=CommandGroup, help="Measure Quire.", no_args_is_help=True)

Output = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Append the records to this file, one JSON object per line."),
]


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The files that records go to."""

    output: Output = None
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the records to this file as CSV.")
    ] = None
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a table to this file as Markdown.")
    ] = None
    png: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write a picture to this file (needs the extra `plots`)."
        ),
    ] = None

    def files(self) -> OutputFiles:
        # Other commands need not import benchmarks.
        from quire.tools.bench.record import OutputFiles

        return OutputFiles(self.output, self.csv, self.markdown, self.png)


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
SimulatedAcceptance = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Accept drafts with this probability, whatever the model says, to measure speculative "
        "decoding with random weights. Records name it.",
    ),
]
Repeat = Annotated[int, typer.Option(min=1, max=100, help="Runs per case; the best counts.")]

_DEFAULT_CASES = ("b1", "b64")


@app.command("throughput", cls=SettingsCommand)
@with_settings(EngineArgs)
@with_options(OutputOptions)
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
    simulate_acceptance: SimulatedAcceptance = None,
    outputs: OutputOptions,
) -> None:
    """Measure the engine through `LLM.generate`, all requests at once."""
    from quire.cli import bench
    from quire.tools.bench.cases import parse_numbers

    sizes = (sweep_rows, sweep_input_len, sweep_output_len)
    sweeps = []
    if batch_sweep is not None:
        sweeps.append(bench.Sweep("rows", parse_numbers(batch_sweep, "batch_sweep"), *sizes))
    if length_sweep is not None:
        sweeps.append(bench.Sweep("input_len", parse_numbers(length_sweep, "length_sweep"), *sizes))
    bench.throughput(
        bench.with_simulated(engine, simulate_acceptance),
        cases=case or (() if sweeps else _DEFAULT_CASES),
        sweeps=sweeps,
        scale=scale,
        repeat=repeat,
        outputs=outputs.files(),
    )


@app.command("latency", cls=SettingsCommand)
@with_settings(EngineArgs)
@with_options(OutputOptions)
def latency(
    *,
    engine: EngineArgs,
    input_len: Annotated[str, typer.Option(help="Prompt lengths, as in 128,512,2048.")] = "512",
    output_len: Annotated[str, typer.Option(help="Output lengths, as in 1,128.")] = "128",
    requests: Annotated[
        int, typer.Option(min=1, max=10_000, help="Requests for each pair of lengths.")
    ] = 12,
    simulate_acceptance: SimulatedAcceptance = None,
    outputs: OutputOptions,
) -> None:
    """Measure one request at a time: first token, between tokens, whole answer."""
    from quire.cli import bench
    from quire.tools.bench.cases import parse_numbers

    bench.latency(
        bench.with_simulated(engine, simulate_acceptance),
        input_lens=parse_numbers(input_len, "input_len"),
        output_lens=parse_numbers(output_len, "output_len"),
        requests=requests,
        outputs=outputs.files(),
    )


@app.command("startup", cls=SettingsCommand)
@with_settings(EngineArgs)
@with_options(OutputOptions)
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
    outputs: OutputOptions,
) -> None:
    """Measure from the command to the first token, in fresh processes."""
    from quire.cli import bench

    bench.start(
        engine,
        cold=cold,
        repeat=repeat,
        timeout=timeout,
        outputs=outputs.files(),
    )


@app.command("ablation", cls=SettingsCommand)
@with_settings(EngineArgs)
@with_options(OutputOptions)
def ablation(
    *,
    engine: EngineArgs,
    case: Cases = None,
    off: Annotated[
        list[str] | None,
        typer.Option(
            help=f"One of {', '.join(OPTIMIZATIONS)} (may be repeated). Default: all that the "
            "engine has."
        ),
    ] = None,
    scale: Scale = 1.0,
    repeat: Repeat = 2,
    outputs: OutputOptions,
) -> None:
    """Measure what each optimization brings, by switching it off."""
    from quire.cli import bench

    bench.ablation(
        engine,
        cases=case or _DEFAULT_CASES,
        off=list(dict.fromkeys(off or ())),
        scale=scale,
        repeat=repeat,
        outputs=outputs.files(),
    )


@app.command("scheduler", cls=SettingsCommand)
def scheduler(output: Output = None) -> None:
    """Measure what a step costs the scheduler."""
    from quire.cli import bench
    from quire.tools.bench.record import OutputFiles

    bench.scheduler(outputs=OutputFiles(output))


@app.command("cache", cls=SettingsCommand)
def cache(
    blocks: Annotated[
        int, typer.Option(min=10_000, max=10_000_000, help="KV blocks, all of them full.")
    ] = 1_000_000,
    output: Output = None,
) -> None:
    """Measure what a request costs the prefix cache."""
    from quire.cli import bench
    from quire.tools.bench.record import OutputFiles

    bench.cache(blocks=blocks, outputs=OutputFiles(output))


@app.command("serve", cls=SettingsCommand)
@with_options(OutputOptions)
def serve(
    *,
    url: Annotated[
        str, typer.Option("--url", "--base-url", help="A server that speaks OpenAI's API.")
    ] = "http://127.0.0.1:8000",
    serve_flags: Annotated[
        str | None,
        typer.Option(
            "--serve",
            help="Start `quire serve` with these flags, in quotes, and load that instead.",
        ),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Sent as a bearer key.")] = None,
    model: Annotated[str | None, typer.Option(help="Default: the first one it names.")] = None,
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    dataset: Annotated[
        Path | None,
        typer.Option(
            help='JSON lines of {"prompt", "output_len"}, or a file in ShareGPT\'s format. '
            "Default: random prompts."
        ),
    ] = None,
    prompts: Annotated[
        str,
        typer.Option(help="Send random prompts as text (the server's /detokenize) or as ids."),
    ] = "text",
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a random prompt.")] = 512,
    output_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens to ask for. Default: the dataset's, or 256.")
    ] = None,
    spread: Annotated[float, typer.Option(help="Draw lengths up to this share off.")] = 0.0,
    prefix_len: Annotated[
        int, typer.Option(min=0, help="Tokens that all random prompts begin with, in addition.")
    ] = 0,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Requests. Default: four times the concurrency.")
    ] = None,
    max_concurrency: Annotated[
        str, typer.Option(help="Requests at once, one level after the other; 0 is no limit.")
    ] = "1,2,4,8,16,32,64",
    request_rate: Annotated[
        float | None, typer.Option(min=1e-6, help="Requests a second, instead of levels.")
    ] = None,
    burstiness: Annotated[
        float, typer.Option(min=1e-3, help="Shape of the gaps; 1 is a Poisson process.")
    ] = 1.0,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before anything counts.")] = 4,
    ignore_eos: Annotated[bool, typer.Option(help="Write on past the end of the text.")] = True,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of sampling.")] = 0.0,
    percentile: Annotated[str, typer.Option(help="Of the times in the records.")] = "50,95,99",
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="Count answers within this, as in ttft:200, tpot:50. May be repeated."),
    ] = None,
    client_processes: Annotated[
        int | None, typer.Option(min=1, max=64, help="Default: one for every 16 streams, up to 8.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for a request.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Of prompts, lengths and gaps.")] = 0,
    device: Annotated[
        str, typer.Option(help="Whose name is recorded as the card: cpu or cuda.")
    ] = "cpu",
    outputs: OutputOptions,
) -> None:
    """Load a server, and measure what its users see."""
    from quire.cli import bench_serve
    from quire.tools.bench.cases import parse_numbers
    from quire.tools.bench.online.load import Lengths
    from quire.tools.bench.online.sweep import Plan, parse_goodput

    sampling: dict[str, Any] = {"temperature": temperature}
    if ignore_eos:
        sampling["ignore_eos"] = True
    plan = Plan(
        endpoint=endpoint,  # type: ignore[arg-type]
        prompts=prompts,  # type: ignore[arg-type]
        lengths=Lengths(
            input_len=input_len, output_len=output_len or 256, spread=spread, prefix_len=prefix_len
        ),
        dataset=dataset,
        dataset_output_len=output_len,
        count=num_prompts,
        rate=request_rate,
        burstiness=burstiness,
        sampling=sampling,
        warmup=warmup,
        processes=client_processes,
        percentiles=parse_numbers(percentile, "percentile"),
        goodput=parse_goodput(goodput or ()),
        timeout=timeout,
        seed=seed,
    )
    if request_rate is not None or max_concurrency.strip() == "0":
        concurrencies = [0]
    else:
        concurrencies = parse_numbers(max_concurrency, "max_concurrency")
    if concurrencies == [0] and num_prompts is None and dataset is None:
        raise ConfigError("say how many with --num-prompts", "num_prompts")
    bench_serve.serve(
        plan,
        url=url,
        flags=serve_flags,
        model=model,
        api_key=api_key,
        concurrencies=concurrencies,
        device=device,
        outputs=outputs.files(),
    )
