"""The commands of `quire bench` that start an engine or measure a part of one."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli.help import with_options
from quire.cli.progress import TimeLeft
from quire.cli.settings import with_settings
from quire.config import OPTIMIZATIONS, EngineArgs, EngineConfig
from quire.errors import ConfigError
from quire.features.speculation.args import SpeculationArgs
from quire.tools.bench import ablation as switches
from quire.tools.bench import cache as prefix_cache
from quire.tools.bench import latency as one_request
from quire.tools.bench import plots
from quire.tools.bench import scheduler as scheduler_steps
from quire.tools.bench import startup as starts
from quire.tools.bench.cases import Case, check_lengths, check_scale, parse_case, parse_numbers
from quire.tools.bench.gpu_meter import GpuMeter
from quire.tools.bench.record import BenchRecord, OutputFiles, card_name, format_table, make_record
from quire.tools.bench.throughput import QuireEngine, measure
from quire.tools.bench.work import ceilings

SIMULATED = "simulate_acceptance"
"""The key of `EngineArgs.speculative` by which drafts are accepted, whatever the model says."""
_DETAILS = (
    "requests", "prompt_tokens", "output_tokens", "kv_utilization_reserved_percent",
    "gpu_utilization_percent", "gpu_memory_gb",
)  # fmt: skip
"""Metrics that are in the records but not on the screen."""

_DEFAULT_CASES = ("b1", "b64")

Output = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Append the records to this file, one JSON object per line."),
]


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The options that name the files of records."""

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


@dataclass(frozen=True, slots=True)
class Sweep:
    """One of a case's sizes takes several values: `axis` is rows or input_len."""

    axis: str
    values: Sequence[int]
    rows: int
    input_len: int
    output_len: int

    def cases(self) -> Iterator[tuple[Case, dict[str, Any]]]:
        """Each case, and what its record says about the sweep."""
        for value in self.values:
            rows = value if self.axis == "rows" else self.rows
            input_len = value if self.axis == "input_len" else self.input_len
            name = f"{rows}x{input_len}x{self.output_len}"
            yield parse_case(name), {"sweep": self.axis, self.axis: value}


def with_simulated(engine: EngineArgs, acceptance: float | None) -> EngineArgs:
    """Returns settings under which drafts are accepted with a probability, if one is given.

    Raises:
        ConfigError: the engine does not speculate.
    """
    if acceptance is None:
        return engine
    if not SpeculationArgs.of(engine).enabled:
        raise ConfigError(
            "simulate_acceptance needs speculative or speculative_model", "simulate_acceptance"
        )
    given = {**(engine.speculative or {}), SIMULATED: acceptance}
    return engine.replace(speculative=given)


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
    """Runs the cases, then the sweeps, on one engine."""
    check_scale(scale)
    sizes = (sweep_rows, sweep_input_len, sweep_output_len)
    sweeps = []
    if batch_sweep is not None:
        sweeps.append(Sweep("rows", parse_numbers(batch_sweep, "batch_sweep"), *sizes))
    if length_sweep is not None:
        sweeps.append(Sweep("input_len", parse_numbers(length_sweep, "length_sweep"), *sizes))
    names = case or (() if sweeps else _DEFAULT_CASES)
    work: list[tuple[Case, dict[str, Any]]] = [(parse_case(name), {}) for name in names]
    for sweep in sweeps:
        work += sweep.cases()
    given, files = _given(with_simulated(engine, simulate_acceptance)), outputs.files()
    config = _resolve(given)
    check_lengths([each for each, _ in work], config.scheduler.max_model_len, scale)
    files.check()
    records: list[BenchRecord] = []
    meter = GpuMeter.of_engine(config.args, config.device)
    with _started(given) as running:
        left = TimeLeft()
        for each, about in work:
            _say(each.name, left.text(len(records), len(work)))
            metrics = measure(running, each, scale=scale, repeat=repeat, meter=meter)
            settings = {"scale": scale, "repeat": repeat, **about}
            records.append(_record(each.name, metrics, running.config, settings))
            files.add(records[-1])
    typer.echo(format_table(records, leave_out=_DETAILS))
    files.finish(records, plots.throughput)


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
    """Measures every prompt length with every output length."""
    prompts, answers = (
        parse_numbers(input_len, "input_len"),
        parse_numbers(output_len, "output_len"),
    )
    given, files = _given(with_simulated(engine, simulate_acceptance)), outputs.files()
    config = _resolve(given)
    one_request.check_lengths(prompts, answers, config.scheduler.max_model_len)
    files.check()
    records: list[BenchRecord] = []
    meter = GpuMeter.of_engine(config.args, config.device)
    pairs = list(itertools.product(prompts, answers))
    with _started(given) as running:
        left = TimeLeft()
        for prompt, answer in pairs:
            name = one_request.case_name(prompt, answer)
            _say(name, left.text(len(records), len(pairs)))
            metrics = one_request.measure(running, prompt, answer, requests=requests, meter=meter)
            settings = {"input_len": prompt, "output_len": answer}
            records.append(_record(name, metrics, running.config, settings))
            files.add(records[-1])
    typer.echo(format_table(records))
    files.finish(records, plots.latency)


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
    """Starts engines in processes of their own; this one stays off the device."""
    files = outputs.files()
    files.check()
    fields = {**_given(engine), "enable_prefix_caching": False}
    name = starts.case_name(engine.load_format, cold=cold)
    typer.echo(f"running {name} ...", err=True)
    command = starts.command(fields)
    metrics = starts.measure(command, cold=cold, repeat=repeat, timeout=timeout)
    device = metrics.pop("device")
    # The device's name is read last, because asking for it takes some of the device's memory.
    record = _record(name, metrics, _resolve(_given(engine)), {"repeat": repeat}, device)
    files.add(record)
    typer.echo(format_table([record]))
    files.finish([record], plots.phases)


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
    """Runs the cases with all optimizations, then on an engine without each of them."""
    check_scale(scale)
    work = [parse_case(name) for name in case or _DEFAULT_CASES]
    fields = _given(engine)
    names = list(dict.fromkeys(off or switches.switches_of(engine.tensor_parallel_size)))
    variants = [("", fields), *((name, switches.without(fields, name)) for name in names)]
    config = _resolve(fields)
    check_lengths(work, config.scheduler.max_model_len, scale)
    files = outputs.files()
    files.check()
    meter = GpuMeter.of_engine(config.args, config.device)
    records: list[BenchRecord] = []
    left, total = TimeLeft(), len(variants) * len(work)
    for name, changed in variants:
        how = f"without {name}" if name else "with everything on"
        with _started(changed) as running:
            for each in work:
                _say(f"{each.name} {how}", left.text(len(records), total))
                metrics = measure(running, each, scale=scale, repeat=repeat, meter=meter)
                settings = {"scale": scale, "repeat": repeat, "off": name}
                record = _record(switches.PREFIX + each.name, metrics, running.config, settings)
                records.append(record)
                files.add(record)
    table = switches.markdown(switches.lines(records))
    typer.echo(table)
    files.finish(records, plots.switches, table)


def scheduler(output: Output = None) -> None:
    """Prints the table, and appends one record per number of running requests."""
    files = OutputFiles(output)
    files.check()
    measured = scheduler_steps.run()
    typer.echo(scheduler_steps.table(measured))
    for metrics in measured:
        files.add(make_record("scheduler", metrics))


def cache(
    blocks: Annotated[
        int, typer.Option(min=10_000, max=10_000_000, help="KV blocks, all of them full.")
    ] = 1_000_000,
    output: Output = None,
) -> None:
    """Prints the table, and appends one record per case."""
    files = OutputFiles(output)
    files.check()
    measured = []
    for name, metrics in prefix_cache.run(num_blocks=blocks):
        measured.append((name, metrics))
        files.add(make_record(f"cache-{name}", metrics, settings={"num_blocks": blocks}))
    typer.echo(prefix_cache.table(measured))


@contextlib.contextmanager
def _started(fields: dict[str, Any]) -> Iterator[QuireEngine]:
    """Yields an engine without a prefix cache, which repeated runs would hit."""
    # `quire bench throughput --help` must not import PyTorch.
    from quire.llm import LLM

    llm = LLM(**{**fields, "enable_prefix_caching": False})
    try:
        config = llm.config
        yield QuireEngine(llm, ceilings(card_name(config.device), config.dtype))
    finally:
        llm.shutdown()


def _say(what: str, progress: str) -> None:
    typer.echo(f"running {what} ({progress}) ...", err=True)


def _resolve(fields: dict[str, Any]) -> EngineConfig:
    # `quire bench throughput --help` must not import PyTorch.
    from quire.engine.builder import resolve

    return resolve(EngineArgs(**fields))


def _given(engine: EngineArgs) -> dict[str, Any]:
    """The settings that differ from the defaults."""
    default = EngineArgs()
    return {name: value for name, value in vars(engine).items() if value != getattr(default, name)}


def _record(
    case: str,
    metrics: dict[str, float],
    config: EngineConfig,
    settings: dict[str, Any],
    device: str | None = None,
) -> BenchRecord:
    """The model goes by the last part of its folder's or hub id's name."""
    model = os.path.basename(os.path.abspath(config.model_name))
    limits = ceilings(card_name(config.device), config.dtype)
    about = {**_given(config.args), "model": model, "dtype": config.dtype, **settings}
    if SIMULATED in (config.args.speculative or {}):
        about["simulated_acceptance"] = (config.args.speculative or {})[SIMULATED]
    if limits is not None:
        about["ceilings"] = limits.described()
    return make_record(case, metrics, model=model, device=device or config.device, settings=about)
