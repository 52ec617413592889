"""Implementation of `quire bench serve`: a server, a load, records."""

from __future__ import annotations

import argparse
import contextlib
import shlex
from collections.abc import Iterator, Sequence

import typer

from quire.errors import ConfigError
from quire.tools.bench import plots
from quire.tools.bench.gpu_meter import GpuMeter
from quire.tools.bench.online.drive import Server, launched
from quire.tools.bench.online.sweep import Plan, levels
from quire.tools.bench.record import BenchRecord, OutputFiles, format_table, make_record

_ON_SCREEN = (
    "failed", "output_tok_s", "ttft_p50_ms", "ttft_p95_ms", "tpot_p50_ms", "itl_p50_ms",
    "itl_p95_ms", "e2el_p50_ms", "goodput_s", "speedup", "client_cpu", "gpu_watts",
    "joules_per_token",
)  # fmt: skip


def serve(
    plan: Plan,
    *,
    url: str,
    flags: str | None,
    model: str | None,
    api_key: str | None,
    concurrencies: Sequence[int],
    device: str,
    outputs: OutputFiles,
) -> None:
    """Runs a load.

    Args:
        flags: of the `quire serve` to start; None loads the server at `url`.
    """
    outputs.check()
    records: list[BenchRecord] = []
    with _address(url, flags) as address:
        server = Server(address, api_key)
        name = model or server.model()
        settings = {
            "endpoint": plan.endpoint,
            "prompts": plan.prompts if plan.dataset is None else plan.dataset.name,
            "input_len": plan.lengths.input_len,
            "output_len": plan.lengths.output_len,
            **({} if flags is None else {"server": flags}),
            **({} if plan.rate is None else {"request_rate": plan.rate}),
            **plan.sampling,
        }
        for level in levels(
            plan, server, name, concurrencies, lambda text: typer.echo(text, err=True),
            GpuMeter() if flags is None else meter_of(flags),
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
            outputs.add(record)
    hidden = [m for record in records for m in record.metrics if m not in _ON_SCREEN]
    typer.echo(format_table(records, leave_out=hidden))
    outputs.finish(records, plots.online)
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
