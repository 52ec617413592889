"""`quire simulate`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from quire.errors import ConfigError
from quire.router.choice import route_policy
from quire.tools.bench.record import OutputFiles
from quire.tools.simulate.calibrate import calibrate as measure_engine
from quire.tools.simulate.calibrate import encode
from quire.tools.simulate.engine_model import EngineModel, read_engine
from quire.tools.simulate.fleet import SimulatedFleet
from quire.tools.simulate.summary import Summary, summarize, write_csv
from quire.tools.workload import read_trace

_POLICIES = ("prefix", "least-loaded", "round-robin")
_TIMES = ("ttft_p50_s", "ttft_p99_s", "latency_p50_s", "latency_p99_s", "itl_p50_s", "itl_p99_s")
"""Figures of the table in seconds."""


def simulate(
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Requests, in Mooncake's or Qwen's format."),
    ] = None,
    *,
    nodes: Annotated[int, typer.Option(min=1, max=100_000, help="Replicas.")] = 4,
    prefill_nodes: Annotated[
        int, typer.Option(min=0, help="How many of them compute prompts for the others.")
    ] = 0,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="As of quire route; may be repeated. Default: each of them."),
    ] = None,
    engine: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="The engine's timings, as --calibrate wrote them."),
    ] = None,
    speed: Annotated[float, typer.Option(help="Factor by which requests come faster.")] = 1.0,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Number of requests to run, from the first. Default: all."),
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Measure this server, which does nothing else, and write --out."
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="QUIRE_REPLICA_KEY", help="Its key, an admin's.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CSV with a line for each policy, or an engine's JSON."),
    ] = None,
) -> None:
    """Runs a trace with each policy, prints a table, and writes a CSV file.

    With `calibrate` it measures a server instead, and writes the model of its engine.

    Raises:
        ConfigError: a setting or a file is wrong.
    """
    if calibrate is not None:
        if out is None:
            raise ConfigError("--calibrate needs --out FILE.json", "out")
        _measure(calibrate, api_key, out)
        return
    if trace is None:
        raise ConfigError("name the requests: --trace FILE.jsonl", "trace")
    policies = [route_policy(name) for name in policy or _POLICIES]
    if not 0 <= prefill_nodes < nodes:
        raise ConfigError(
            f"prefill_nodes must leave nodes to decode, got {prefill_nodes} of {nodes}",
            "prefill_nodes",
        )
    if not speed > 0.0:
        raise ConfigError(f"speed must be > 0, got {speed}", "speed")
    OutputFiles(csv=out).check()
    model = EngineModel() if engine is None else read_engine(engine)
    read = read_trace(trace, speed=speed, most=requests)
    console, summaries = Console(stderr=True), list[Summary]()
    for each in policies:
        began = time.perf_counter()
        fleet = SimulatedFleet(nodes, model, each, read.block_size, prefill_nodes)
        summaries.append(summarize(fleet.run(read), each, nodes, prefill_nodes))
        console.print(f"{each}: simulated in {time.perf_counter() - began:.1f} s")
    typer.echo(_table(summaries))
    if out is not None:
        write_csv(out, summaries)


def _table(summaries: Sequence[Summary]) -> str:
    lines = ["".join(f"{name:>15}" for name in ("policy", "hits", "apart", "tokens/s", *_TIMES))]
    for each in summaries:
        shares = f"{each.policy:>15}{each.hit_rate:>15.1%}{each.apart:>15.1%}"
        seconds = "".join(f"{getattr(each, name):>15.4f}" for name in _TIMES)
        lines.append(f"{shares}{each.output_tok_s:>15.0f}{seconds}")
    return "\n".join(lines)


def _measure(url: str, key: str | None, out: Path) -> None:
    """Measures a server, and writes the model of its engine.

    Raises:
        ConfigError: the server does not answer, or the file cannot be written.
    """
    OutputFiles(csv=out).check()
    found = measure_engine(url, key=key, model=None)
    try:
        out.write_bytes(encode(found))
    except OSError as error:
        raise ConfigError(f"out: {error}", "out") from None
    typer.echo(f"Wrote {out}.")
