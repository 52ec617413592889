"""`quire bench serve`: a server, a load, records."""

from __future__ import annotations

import argparse
import contextlib
import shlex
from collections.abc import Iterator
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
from quire.tools.bench.online.sweep import Plan, levels, parse_goodput
from quire.tools.bench.record import BenchRecord, format_table, make_record

_ON_SCREEN = (
    "failed", "output_tok_s", "ttft_p50_ms", "ttft_p95_ms", "tpot_p50_ms", "itl_p50_ms",
    "itl_p95_ms", "e2el_p50_ms", "goodput_s", "speedup", "client_cpu", "gpu_watts",
    "joules_per_token",
)  # fmt: skip


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
        float | None, typer.Option(min=1e-6, help="Requests a second, instead of levels.")
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
    files = outputs.files()
    files.check()
    records: list[BenchRecord] = []
    with _address(url, serve_flags) as address:
        server = Server(address, api_key)
        name = model or server.model()
        settings = {
            "endpoint": plan.endpoint,
            "prompts": plan.prompts if plan.dataset is None else plan.dataset.name,
            "input_len": plan.lengths.input_len,
            "output_len": plan.lengths.output_len,
            **({} if serve_flags is None else {"server": serve_flags}),
            **({} if plan.rate is None else {"request_rate": plan.rate}),
            **plan.sampling,
        }
        for level in levels(
            plan, server, name, concurrencies, lambda text: typer.echo(text, err=True),
            GpuMeter() if serve_flags is None else meter_of(serve_flags),
        ):  # fmt: skip
            for problem in level.problems:
                typer.echo(f"  {problem}", err=True)
            about = {**settings, "concurrency": level.concurrency}
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
    hidden = [m for record in records for m in record.metrics if m not in _ON_SCREEN]
    typer.echo(format_table(records, leave_out=hidden))
    files.finish(records, plots.online)
    if any(not record.metrics.get("requests") for record in records):
        raise ConfigError("no request was answered", "url")


def _case(plan: Plan, concurrency: int) -> str:
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
