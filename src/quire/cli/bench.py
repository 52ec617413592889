"""`quire bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from quire.bench.record import BenchRecord, append_jsonl, format_table, make_record
from quire.config import EngineArgs


def throughput(
    engine: EngineArgs, *, cases: list[str], scale: float, repeat: int, output: Path | None
) -> None:
    """Runs the cases on one engine. The prefix cache is off: repeated runs would hit it."""
    from quire.bench.throughput import check_cases, measure, measure_ttft
    from quire.engine.builder import resolve
    from quire.llm import LLM

    check_cases(cases, scale)
    fields = {**_given(engine), "enable_prefix_caching": False}
    config = resolve(EngineArgs(**fields))
    llm = LLM(**fields)
    records: list[BenchRecord] = []
    try:
        for case in cases:
            typer.echo(f"running {case} ...", err=True)
            if case == "ttft":
                metrics = measure_ttft(
                    llm,
                    vocab_size=config.vocab_size,
                    max_model_len=config.scheduler.max_model_len,
                    scale=scale,
                )
            else:
                metrics = measure(
                    llm, case, vocab_size=config.vocab_size, scale=scale, repeat=repeat
                )
            records.append(
                make_record(
                    case,
                    metrics,
                    model=config.model_name,
                    device=config.device,
                    settings={**fields, "model": config.model_name, "scale": scale},
                )
            )
    finally:
        llm.shutdown()
    typer.echo(format_table(records))
    if output is not None:
        append_jsonl(output, records)


def _given(engine: EngineArgs) -> dict[str, Any]:
    """The settings that differ from the defaults."""
    default = EngineArgs()
    return {name: value for name, value in vars(engine).items() if value != getattr(default, name)}


def scheduler(*, output: Path | None) -> None:
    """Prints the table, and appends one record per number of running requests."""
    from quire.bench.scheduler import run, table

    measured = run()
    typer.echo(table(measured))
    if output is not None:
        append_jsonl(output, [make_record("scheduler", metrics) for metrics in measured])
