"""`quire profile`: a workload under torch's profiler."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import typer

from quire.config import EngineArgs
from quire.errors import ConfigError
from quire.llm import LLM
from quire.tools.bench.cases import parse_case
from quire.tools.bench.record import BenchRecord, append_jsonl, card_name, make_record
from quire.tools.bench.work import ceilings

_LISTED = 12


def profile(
    engine: EngineArgs,
    *,
    rows: Sequence[int],
    prompt_tokens: int,
    steps: int,
    cases: Sequence[str],
    trace: Path | None,
    nvtx: bool,
    as_json: bool,
    output: Path | None,
) -> None:
    """Profiles decode steps of so many rows each, then whole cases.

    Raises:
        ConfigError: see `Profiler`; or there is one trace file for several profiles, or it cannot
            be written.
    """
    from quire.tools.profile.profile import Profiler

    if trace is not None and len(rows) + len(cases) > 1:
        raise ConfigError("a trace holds one profile: give one --rows, or one --case", "trace")
    if trace is not None and (trace.is_dir() or not os.access(trace.absolute().parent, os.W_OK)):
        raise ConfigError(f"{str(trace)!r} cannot be written", "trace")
    known = [parse_case(name) for name in cases]
    settings = dataclasses.asdict(engine)
    llm = LLM(settings.pop("model"), **settings)
    with ExitStack() as stack:
        stack.callback(llm.shutdown)
        card = card_name(llm.config.device)
        profiler = Profiler(llm, ceilings(card, llm.config.dtype), nvtx=nvtx)
        found = [profiler.decode(n, prompt_tokens, steps, trace) for n in rows]
        found += [profiler.case(case, trace) for case in known]
        records = [
            make_record(
                each.case,
                each.metrics(),
                model=os.path.basename(os.path.abspath(llm.config.model_name)),
                device=llm.config.device,
                settings={"prompt_tokens": prompt_tokens, "steps": each.steps},
            )
            for each in found
            if each is not None
        ]
    if output is not None:
        append_jsonl(output, records)
    if as_json:
        typer.echo(json.dumps([{"case": r.case, **r.metrics} for r in records], indent=2))
        return
    for record in records:
        _print(record)
    if trace is not None and records:
        typer.echo(f"\n{trace}: open it in https://ui.perfetto.dev")


def _print(record: BenchRecord) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    metrics = dict(record.metrics)
    step = metrics.pop("step_us")
    heading = (
        f"{metrics.pop('launches'):,.0f} launches a step, {metrics.pop('tflop_s'):.3g} TFLOP/s"
    )
    for name, label in (("mfu_percent", "MFU"), ("bandwidth_percent", "bandwidth")):
        if name in metrics:
            heading += f", {label} {metrics.pop(name):.1f} %"
    heading += f", idle {metrics.pop('idle_percent'):.1f} %"
    console = Console(highlight=False)
    case = record.case.removeprefix("breakdown_")
    what = f"decode, rows: {case}" if case.isdigit() else case
    steps: Any = record.settings["steps"]
    console.print(
        Text(f"\n{record.model} on {record.card}, {what}: {step:,.1f} µs a step, {steps} steps")
    )
    console.print(Text(heading))
    table = Table.grid(padding=(0, 2))
    for name, us in sorted(metrics.items(), key=lambda item: -item[1])[:_LISTED]:
        share = Text(f"{100 * us / step:.1f} %", justify="right")
        table.add_row(
            Text(f"  {us:,.1f} µs", justify="right"), share, Text(name.removesuffix("_us"))
        )
    console.print(table)
