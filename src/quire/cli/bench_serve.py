"""`quire bench serve`: a server, a load, records."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli.bench import OutputOptions
from quire.cli.help import with_options
from quire.errors import ConfigError
from quire.tools.bench import plots
from quire.tools.bench.cases import parse_numbers
from quire.tools.bench.gpu_meter import GpuMeter
from quire.tools.bench.online.drive import Server, launched
from quire.tools.bench.online.load import Lengths
from quire.tools.bench.online.sweep import (
    Aims,
    LoadLevel,
    SweepPlan,
    highest_rate,
    levels,
    parse_aims,
    parse_goodput,
)
from quire.tools.bench.record import BenchRecord, format_table, make_record
from quire.tools.workload import WorkloadTrace, chat_trace, read_trace

_ON_SCREEN = (
    "failed", "output_tok_s", "ttft_p50_ms", "ttft_p95_ms", "tpot_p50_ms", "itl_p50_ms",
    "itl_p95_ms", "e2el_p50_ms", "goodput_s", "speedup", "client_cpu", "gpu_watts",
    "joules_per_token",
)  # fmt: skip

_CHATS = 400
"""Requests of the trace `chats`, if --num-prompts gives no number."""
_SEEDS = 1_000_000
"""Distance of the seeds of two runs."""


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
    model: Annotated[
        str | None, typer.Option(help="Default: the first one that the server lists.")
    ] = None,
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    dataset: Annotated[
        Path | None,
        typer.Option(
            help='JSON lines of {"prompt", "output_len"}, or a file in ShareGPT\'s format. '
            "Default: random prompts."
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Send requests with the times, lengths and common prefixes of a trace, in "
            "Mooncake's, Qwen's, Azure's or BurstGPT's format. `chats` makes one.",
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
    spread: Annotated[
        float, typer.Option(help="Draw lengths up to this share longer or shorter.")
    ] = 0.0,
    prefix_len: Annotated[
        int, typer.Option(min=0, help="Length of a common prefix, added to all random prompts.")
    ] = 0,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Requests. Default: four times the concurrency.")
    ] = None,
    max_concurrency: Annotated[
        str, typer.Option(help="Requests at once, one level after the other; 0 is no limit.")
    ] = "1,2,4,8,16,32,64",
    request_rate: Annotated[
        float | None,
        typer.Option(
            min=1e-6,
            help="Requests a second, instead of levels. With --slo, the first rate of the search. "
            "Default with --trace: the trace's.",
        ),
    ] = None,
    burstiness: Annotated[
        float, typer.Option(min=1e-3, help="Shape of the gaps; 1 is a Poisson process.")
    ] = 1.0,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before anything counts.")] = 4,
    ignore_eos: Annotated[bool, typer.Option(help="Generate past the end-of-text token.")] = True,
    temperature: Annotated[float, typer.Option(min=0.0, help="Temperature of sampling.")] = 0.0,
    percentile: Annotated[
        str, typer.Option(help="Percentiles of the times in the records.")
    ] = "50,95,99",
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="Count answers within this, as in ttft:200, tpot:50. May be repeated."),
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            help="Search for the highest request rate that keeps this, as in ttft:500, itl:30. "
            "May be repeated."
        ),
    ] = None,
    slo_percentile: Annotated[
        float, typer.Option(help="Percentile of the times that --slo limits.")
    ] = 99.0,
    client_processes: Annotated[
        int | None, typer.Option(min=1, max=64, help="Default: one for every 16 streams, up to 8.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for a request.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Seed of prompts, lengths and gaps.")] = 0,
    device: Annotated[
        str, typer.Option(help="Whose name is recorded as the card: cpu or cuda.")
    ] = "cpu",
    outputs: OutputOptions,
) -> None:
    """Loads a server with each number of requests at once, and prints a record for each."""
    sampling: dict[str, Any] = {"temperature": temperature}
    if ignore_eos:
        sampling["ignore_eos"] = True
    requests = None if trace is None else _trace(trace, num_prompts)
    if requests is not None and dataset is not None:
        raise ConfigError("--trace and --dataset are two sources of prompts: give one", "trace")
    aims = parse_aims(slo, slo_percentile) if slo else None
    plan = SweepPlan(
        endpoint=endpoint,  # type: ignore[arg-type]
        prompts=prompts,  # type: ignore[arg-type]
        lengths=Lengths(
            input_len=input_len, output_len=output_len or 256, spread=spread, prefix_len=prefix_len
        ),
        dataset=dataset,
        trace=requests,
        dataset_output_len=output_len,
        count=num_prompts if requests is None else len(requests.requests),
        rate=request_rate or (requests.rate if requests is not None else None),
        burstiness=burstiness,
        sampling=sampling,
        warmup=warmup,
        processes=client_processes,
        percentiles=parse_numbers(percentile, "percentile"),
        goodput=parse_goodput(goodput or ()),
        timeout=timeout,
        seed=seed,
    )
    concurrencies = _concurrencies(plan, max_concurrency, aims)
    files = outputs.files()
    files.check()
    records: list[BenchRecord] = []
    with _address(url, serve_flags) as address:
        server = Server(address, api_key)
        name = model or server.model()
        settings = {
            "endpoint": plan.endpoint,
            "prompts": trace or (plan.prompts if plan.dataset is None else plan.dataset.name),
            "input_len": plan.lengths.input_len,
            "output_len": plan.lengths.output_len,
            **({} if serve_flags is None else {"server": serve_flags}),
            **plan.sampling,
        }
        meter = GpuMeter() if serve_flags is None else meter_of(serve_flags)

        def measure(plan: SweepPlan) -> Iterator[LoadLevel]:
            return levels(plan, server, name, concurrencies, _tell, meter)

        def note(plan: SweepPlan, level: LoadLevel) -> None:
            for problem in level.problems:
                _tell(f"  {problem}")
            about = {**settings, "concurrency": level.concurrency}
            if plan.rate is not None:
                about["request_rate"] = round(plan.rate, 4)
            record = make_record(
                _case(plan, level.concurrency), level.metrics, model=name, device=device,
                settings=about,
            )  # fmt: skip
            alone = next((r for r in records if r.settings["concurrency"] == 1), None)
            speed = alone and alone.metrics.get("output_tok_s")
            if speed and "output_tok_s" in level.metrics:
                record.metrics["speedup"] = record.metrics["output_tok_s"] / speed
            records.append(record)
            files.add(record)

        if aims is None:
            for level in measure(plan):
                note(plan, level)
        else:
            best = _search(plan, aims, measure, note)
            limits = {f"{kind}_limit_ms": limit for kind, limit in aims.limits.items()}
            record = make_record(
                "goodput", {"request_rate": best or 0.0, **limits}, model=name, device=device,
                settings={**settings, "percentile": aims.percentile},
            )  # fmt: skip
            files.add(record)
    hidden = [m for record in records for m in record.metrics if m not in _ON_SCREEN]
    typer.echo(format_table(records, leave_out=hidden))
    draw = plots.online if aims is None else functools.partial(plots.rates, limits=aims.limits)
    files.finish(records, draw)
    if aims is not None:
        typer.echo(_verdict(aims, best))
    if any(not record.metrics.get("requests") for record in records):
        raise ConfigError("no request was answered", "url")


def _tell(text: str) -> None:
    typer.echo(text, err=True)


def _concurrencies(plan: SweepPlan, asked: str, aims: Aims | None) -> list[int]:
    """Returns the numbers of requests at once that `asked` names; [0] if times are given.

    Raises:
        ConfigError: nothing says how many requests to send, or how fast.
    """
    if aims is not None and plan.rate is None:
        raise ConfigError("--slo needs --request-rate, the first rate, or --trace", "slo")
    timed = plan.rate is not None or asked.strip() == "0"
    found = [0] if timed else parse_numbers(asked, "max_concurrency")
    if found == [0] and plan.count is None and plan.dataset is None:
        raise ConfigError("say how many with --num-prompts", "num_prompts")
    return found


def _trace(name: str, most: int | None) -> WorkloadTrace:
    """Returns the trace of a file, or the one that `chats` names.

    Raises:
        ConfigError: the file is no trace.
    """
    return chat_trace(most or _CHATS) if name == "chats" else read_trace(Path(name), most=most)


def _search(
    plan: SweepPlan,
    aims: Aims,
    measure: Callable[[SweepPlan], Iterator[LoadLevel]],
    note: Callable[[SweepPlan, LoadLevel], None],
) -> float | None:
    """Returns the highest rate at which the server keeps its aims, or None."""
    percentiles = sorted({*plan.percentiles, aims.percentile})
    runs = itertools.count()

    def keeps(rate: float) -> bool:
        # Other prompts each time: a prompt that a server has in its cache costs it less.
        number = next(runs)
        warmup = 0 if number else plan.warmup
        seed = plan.seed + _SEEDS * number
        asked = replace(plan, rate=rate, warmup=warmup, seed=seed, percentiles=percentiles)
        (level,) = measure(asked)
        note(asked, level)
        misses = aims.misses(level.metrics)
        _tell(f"  {rate:.3g} requests/s: {'; '.join(misses) or 'kept'}")
        return not misses

    return highest_rate(keeps, plan.rate or 1.0)


def _verdict(aims: Aims, best: float | None) -> str:
    limits = ", ".join(f"{aims.metric(kind)} <= {limit:g}" for kind, limit in aims.limits.items())
    if best is None:
        return f"No rate keeps {limits}."
    return f"Highest rate that keeps {limits}: {best:.3g} requests/s."


def _case(plan: SweepPlan, concurrency: int) -> str:
    if plan.rate is not None:
        return f"serve-{plan.rate:g}rps"
    return f"serve-{concurrency}" if concurrency else "serve-all"


def meter_of(flags: str) -> GpuMeter:
    """Returns the meter of the GPUs of a server with these flags; one without figures if it runs on
    a CPU. Of a server elsewhere nothing is known."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device", default="cuda")
    sizes = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
    for name in sizes:
        parser.add_argument(f"--{name}", type=int, default=1)
    given, _ = parser.parse_known_args(shlex.split(flags))
    count = given.tensor_parallel_size * given.pipeline_parallel_size * given.data_parallel_size
    return GpuMeter.of_device("cuda" if given.device == "auto" else given.device, count)


@contextlib.contextmanager
def _address(url: str, flags: str | None) -> Iterator[str]:
    if flags is None:
        yield url
    else:
        typer.echo(f"starting quire serve {flags} ...", err=True)
        with launched(flags) as (address, _):
            yield address
