"""`quire profile` and `quire trace`: a workload, profiled or traced."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import typer

from quire.cli.progress import counted
from quire.config import EngineArgs
from quire.errors import ConfigError, PromptTooLongError
from quire.llm import LLM
from quire.sampling_params import SamplingParams
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


# `quire trace`: a small workload, and a trace of its steps.


def trace(
    output: Path, engine: EngineArgs, requests: int, prompt_tokens: int, output_tokens: int
) -> None:
    """Runs requests that come all at once, after one that compiles everything.

    Raises:
        ConfigError: `output` cannot be written, or `trace_dir` is set.
        RequestError: the model's context does not hold such requests.
    """
    if engine.trace_dir is not None:
        raise ConfigError("quire trace writes one file: leave trace_dir out", "trace_dir")
    if not os.access(output.parent, os.W_OK) or output.is_dir():
        raise ConfigError(f"{str(output)!r} cannot be written")
    with tempfile.TemporaryDirectory() as folder:
        settings = dataclasses.asdict(dataclasses.replace(engine, trace_dir=folder))
        llm = LLM(settings.pop("model"), **settings)
        with closing(_Closing(llm)):
            if prompt_tokens >= llm.config.scheduler.max_model_len:  # before so many are drawn
                raise PromptTooLongError(prompt_tokens, llm.config.scheduler.max_model_len)
            params = SamplingParams(
                temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
            )
            rng = np.random.default_rng(engine.seed)
            size = (requests + 1, prompt_tokens)
            prompts = rng.integers(0, llm.config.vocab_size, size).tolist()
            llm.generate([prompts[0]], params, use_tqdm=False)
            llm.generate(prompts[1:], params)
            steps = llm.stats().steps
        _join(sorted(Path(folder).iterdir()), output)
    typer.echo(f"{output}: {counted(steps, 'step')}; open it in https://ui.perfetto.dev")


class _Closing:
    def __init__(self, llm: LLM) -> None:
        self.close = llm.shutdown


def _join(files: list[Path], output: Path) -> None:
    """Joins trace files, each an array with one event per line; the last line holds no event."""
    with output.open("w", encoding="utf-8") as out:
        out.write("[\n")
        for file in files:
            with file.open(encoding="utf-8") as lines:
                out.writelines(line for line in lines if line.endswith("},\n"))
        out.write('{"name":"end of file","ph":"M","pid":0,"args":{}}\n]\n')
