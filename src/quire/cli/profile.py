"""`quire profile` and `quire trace`: a workload, profiled or traced."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from contextlib import ExitStack
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quire.cli.help import AsJson
from quire.cli.progress import counted
from quire.cli.settings import with_settings
from quire.config import EngineArgs
from quire.errors import ConfigError, PromptTooLongError
from quire.llm import LLM
from quire.sampling_params import SamplingParams
from quire.tools.bench.cases import parse_case
from quire.tools.bench.record import BenchRecord, append_jsonl, card_name, make_record
from quire.tools.bench.work import ceilings
from quire.tools.profile.profile import Profiler

_LISTED = 12


@with_settings(EngineArgs)
def profile(
    *,
    engine: EngineArgs,
    rows: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            show_default=False,
            help="Profile decode steps of so many requests (repeatable). Default: 1 and 8, unless "
            "there are cases.",
        ),
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Random prompt tokens before those steps.")
    ] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps to profile.")] = 50,
    case: Annotated[
        list[str] | None,
        typer.Option(
            show_default=False,
            help="Profile a whole case of quire bench throughput, prompts included (repeatable).",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the profile for https://ui.perfetto.dev, too."),
    ] = None,
    nvtx: Annotated[
        bool,
        typer.Option("--nvtx", help="Only name steps and layers, for nsys to profile the command."),
    ] = False,
    json: AsJson = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Append records to this file, one JSON object a line."),
    ] = None,
) -> None:
    """Profiles decode steps of each number of rows, then whole cases.

    Raises:
        ConfigError: see `Profiler`; or there is one trace file for several profiles, or it cannot
            be written.
    """
    batches = rows or ([] if case else [1, 8])
    cases = [parse_case(name) for name in case or ()]
    if trace is not None and len(batches) + len(cases) > 1:
        raise ConfigError("a trace holds one profile: give one --rows, or one --case", "trace")
    if trace is not None and (trace.is_dir() or not os.access(trace.absolute().parent, os.W_OK)):
        raise ConfigError(f"{str(trace)!r} cannot be written", "trace")
    settings = dataclasses.asdict(engine)
    llm = LLM(settings.pop("model"), **settings)
    with ExitStack() as stack:
        stack.callback(llm.shutdown)
        card = card_name(llm.config.device)
        profiler = Profiler(llm, ceilings(card, llm.config.dtype), nvtx=nvtx)
        found = [profiler.decode(n, prompt_tokens, steps, trace) for n in batches]
        found += [profiler.case(each, trace) for each in cases]
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
    if json:
        typer.echo(dumps([{"case": r.case, **r.metrics} for r in records], indent=2))
        return
    for record in records:
        _print(record)
    if trace is not None and records:
        typer.echo(f"\n{trace}: open it in https://ui.perfetto.dev")


def _print(record: BenchRecord) -> None:
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


@with_settings(EngineArgs, positional=False)
def trace(
    output: Annotated[
        Path, typer.Argument(metavar="OUT.json", help="The trace, for https://ui.perfetto.dev.")
    ],
    *,
    engine: EngineArgs,
    requests: Annotated[int, typer.Option(min=1, max=100_000, help="Requests to run.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Random tokens of each.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each.")] = 32,
) -> None:
    """Runs requests that all come at once, after one that compiles the kernels.

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
        with ExitStack() as stack:
            stack.callback(llm.shutdown)
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


def _join(files: list[Path], output: Path) -> None:
    """Joins trace files, each an array with one event per line; the last line holds no event."""
    with output.open("w", encoding="utf-8") as out:
        out.write("[\n")
        for file in files:
            with file.open(encoding="utf-8") as lines:
                out.writelines(line for line in lines if line.endswith("},\n"))
        out.write('{"name":"end of file","ph":"M","pid":0,"args":{}}\n]\n')
