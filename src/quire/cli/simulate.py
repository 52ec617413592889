"""`quire simulate`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

from quire.errors import ConfigError
from quire.router.choice import route_policy
from quire.tools.bench.record import OutputFiles
from quire.tools.simulate.calibrate import calibrate, encode
from quire.tools.simulate.engine_model import EngineModel, read_engine
from quire.tools.simulate.fleet import SimulatedFleet
from quire.tools.simulate.summary import Summary, summarize, write_csv
from quire.tools.simulate.trace import read_trace

_TIMES = ("ttft_p50_s", "ttft_p99_s", "latency_p50_s", "latency_p99_s", "itl_p50_s", "itl_p99_s")
"""Figures of the table in seconds."""


def simulate(
    *,
    nodes: int,
    prefill_nodes: int,
    trace: Path,
    policies: Sequence[str],
    engine: Path | None,
    speed: float,
    most: int | None,
    out: Path | None,
) -> None:
    """Runs a trace by each policy, prints a table, and writes a CSV file.

    Raises:
        ConfigError: a setting or a file is wrong.
    """
    known = [route_policy(name) for name in policies]
    if not 0 <= prefill_nodes < nodes:
        raise ConfigError(
            f"prefill_nodes must leave nodes to decode, got {prefill_nodes} of {nodes}",
            "prefill_nodes",
        )
    if not speed > 0.0:
        raise ConfigError(f"speed must be > 0, got {speed}", "speed")
    OutputFiles(csv=out).check()
    model = EngineModel() if engine is None else read_engine(engine)
    read = read_trace(trace, speed=speed, most=most)
    console, summaries = Console(stderr=True), list[Summary]()
    for policy in known:
        began = time.perf_counter()
        fleet = SimulatedFleet(nodes, model, policy, read.block_size, prefill_nodes)
        summaries.append(summarize(fleet.run(read), policy, nodes, prefill_nodes))
        console.print(f"{policy}: simulated in {time.perf_counter() - began:.1f} s")
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


def measure(url: str, *, key: str | None, model: str | None, out: Path) -> None:
    """Measures a server, and writes the model of its engine.

    Raises:
        ConfigError: the server does not answer, or the file cannot be written.
    """
    OutputFiles(csv=out).check()
    found = calibrate(url, key=key, model=model)
    try:
        out.write_bytes(encode(found))
    except OSError as error:
        raise ConfigError(f"out: {error}", "out") from None
    typer.echo(f"Wrote {out}.")
