"""Implementation of the `quire bench` commands: an engine, its cases, and files of records."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from quire.cli.progress import TimeLeft
from quire.config import EngineArgs, EngineConfig
from quire.errors import ConfigError
from quire.tools.bench import ablation as switches
from quire.tools.bench import plots, startup
from quire.tools.bench.cases import Case, check_lengths, check_scale, parse_case
from quire.tools.bench.gpu_meter import GpuMeter
from quire.tools.bench.record import BenchRecord, OutputFiles, card_name, format_table, make_record
from quire.tools.bench.work import ceilings

if TYPE_CHECKING:
    from quire.tools.bench.throughput import QuireEngine

SIMULATED = "simulate_acceptance"
"""The key of `EngineArgs.speculative` by which drafts are accepted, whatever the model says."""
_DETAILS = (
    "requests", "prompt_tokens", "output_tokens", "kv_utilization_reserved_percent",
    "gpu_utilization_percent", "gpu_memory_gb",
)  # fmt: skip
"""Metrics that are in the records but not on the screen."""


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
    if not engine.speculates:
        raise ConfigError(
            "simulate_acceptance needs speculative or speculative_model", "simulate_acceptance"
        )
    given = {**(engine.speculative or {}), SIMULATED: acceptance}
    return dataclasses.replace(engine, speculative=given)


def throughput(
    engine: EngineArgs,
    *,
    cases: Sequence[str],
    sweeps: Sequence[Sweep],
    scale: float,
    repeat: int,
    outputs: OutputFiles,
) -> None:
    """Runs the cases, then the sweeps, on one engine."""
    from quire.tools.bench.throughput import measure

    check_scale(scale)
    work: list[tuple[Case, dict[str, Any]]] = [(parse_case(name), {}) for name in cases]
    for sweep in sweeps:
        work += sweep.cases()
    config = _resolve(_given(engine))
    check_lengths([case for case, _ in work], config.scheduler.max_model_len, scale)
    outputs.check()
    records: list[BenchRecord] = []
    meter = GpuMeter.of_engine(config.args, config.device)
    with _started(_given(engine)) as running:
        left = TimeLeft()
        for case, about in work:
            _say(case.name, left.text(len(records), len(work)))
            metrics = measure(running, case, scale=scale, repeat=repeat, meter=meter)
            settings = {"scale": scale, "repeat": repeat, **about}
            records.append(_record(case.name, metrics, running.config, settings))
            outputs.add(records[-1])
    typer.echo(format_table(records, leave_out=_DETAILS))
    outputs.finish(records, plots.throughput)


def latency(
    engine: EngineArgs,
    *,
    input_lens: Sequence[int],
    output_lens: Sequence[int],
    requests: int,
    outputs: OutputFiles,
) -> None:
    """Every length of prompt with every length of output."""
    from quire.tools.bench import latency as bench

    config = _resolve(_given(engine))
    bench.check_lengths(input_lens, output_lens, config.scheduler.max_model_len)
    outputs.check()
    records: list[BenchRecord] = []
    meter = GpuMeter.of_engine(config.args, config.device)
    with _started(_given(engine)) as running:
        left, total = TimeLeft(), len(input_lens) * len(output_lens)
        for input_len in input_lens:
            for output_len in output_lens:
                name = bench.case_name(input_len, output_len)
                _say(name, left.text(len(records), total))
                metrics = bench.measure(
                    running, input_len, output_len, requests=requests, meter=meter
                )
                settings = {"input_len": input_len, "output_len": output_len}
                records.append(_record(name, metrics, running.config, settings))
                outputs.add(records[-1])
    typer.echo(format_table(records))
    outputs.finish(records, plots.latency)


def start(
    engine: EngineArgs, *, cold: bool, repeat: int, timeout: float, outputs: OutputFiles
) -> None:
    """Starts engines in processes of their own; this one stays off the device."""
    outputs.check()
    fields = {**_given(engine), "enable_prefix_caching": False}
    name = startup.case_name(engine.load_format, cold=cold)
    typer.echo(f"running {name} ...", err=True)
    command = startup.command(fields)
    metrics = startup.measure(command, cold=cold, repeat=repeat, timeout=timeout)
    device = metrics.pop("device")
    # Only now: to ask the device its name takes some of its memory.
    record = _record(name, metrics, _resolve(_given(engine)), {"repeat": repeat}, device)
    outputs.add(record)
    typer.echo(format_table([record]))
    outputs.finish([record], plots.phases)


def ablation(
    engine: EngineArgs,
    *,
    cases: Sequence[str],
    off: Sequence[str],
    scale: float,
    repeat: int,
    outputs: OutputFiles,
) -> None:
    """The cases with everything on, then on one engine for each switch that is off, by default
    for all that it has."""
    from quire.tools.bench.throughput import measure

    check_scale(scale)
    work = [parse_case(name) for name in cases]
    fields = _given(engine)
    off = off or switches.switches_of(engine.tensor_parallel_size)
    variants = [("", fields), *((name, switches.without(fields, name)) for name in off)]
    config = _resolve(fields)
    check_lengths(work, config.scheduler.max_model_len, scale)
    outputs.check()
    meter = GpuMeter.of_engine(config.args, config.device)
    records: list[BenchRecord] = []
    left, total = TimeLeft(), len(variants) * len(work)
    for name, changed in variants:
        how = f"without {name}" if name else "with everything on"
        with _started(changed) as running:
            for case in work:
                _say(f"{case.name} {how}", left.text(len(records), total))
                metrics = measure(running, case, scale=scale, repeat=repeat, meter=meter)
                settings = {"scale": scale, "repeat": repeat, "off": name}
                record = _record(switches.PREFIX + case.name, metrics, running.config, settings)
                records.append(record)
                outputs.add(record)
    table = switches.markdown(switches.lines(records))
    typer.echo(table)
    outputs.finish(records, plots.switches, table)


def scheduler(*, outputs: OutputFiles) -> None:
    """Prints the table, and appends one record per number of running requests."""
    from quire.tools.bench.scheduler import run, table

    outputs.check()
    measured = run()
    typer.echo(table(measured))
    for metrics in measured:
        outputs.add(make_record("scheduler", metrics))


def cache(*, blocks: int, outputs: OutputFiles) -> None:
    """Prints the table, and appends one record per case."""
    from quire.tools.bench.cache import run, table

    outputs.check()
    measured = []
    for name, metrics in run(num_blocks=blocks):
        measured.append((name, metrics))
        outputs.add(make_record(f"cache-{name}", metrics, settings={"num_blocks": blocks}))
    typer.echo(table(measured))


@contextlib.contextmanager
def _started(fields: dict[str, Any]) -> Iterator[QuireEngine]:
    """An engine without a prefix cache, which repeated runs would hit."""
    from quire.llm import LLM
    from quire.tools.bench.throughput import QuireEngine

    llm = LLM(**{**fields, "enable_prefix_caching": False})
    try:
        config = llm.config
        yield QuireEngine(llm, ceilings(card_name(config.device), config.dtype))
    finally:
        llm.shutdown()


def _say(what: str, progress: str) -> None:
    typer.echo(f"running {what} ({progress}) ...", err=True)


def _resolve(fields: dict[str, Any]) -> EngineConfig:
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
