"""The figures of a simulated run, and their file."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from quire.errors import ConfigError
from quire.router.choice import RoutePolicy
from quire.tools.simulate.fleet import FleetRun


class Summary(msgspec.Struct, frozen=True):
    """The figures of one policy. Times are in seconds.

    Attributes:
        policy: the policy.
        nodes: number of nodes.
        prefill_nodes: number of prefill nodes.
        requests: number of requests.
        seconds: time from the first arrival to the last token.
        output_tok_s: output tokens per second.
        hit_rate: fraction of prompt tokens that were cached.
        apart: fraction of prompts that another replica computed.
        ttft_p50_s: median time to the first token.
        ttft_p99_s: 99th percentile of the time to the first token.
        latency_p50_s: median time to the last token.
        latency_p99_s: 99th percentile of the time to the last token.
        itl_p50_s: median over requests of the mean time between two tokens.
        itl_p99_s: 99th percentile over requests of the mean time between two tokens.
    """

    policy: RoutePolicy
    nodes: int
    prefill_nodes: int
    requests: int
    seconds: float
    output_tok_s: float
    hit_rate: float
    apart: float
    ttft_p50_s: float
    ttft_p99_s: float
    latency_p50_s: float
    latency_p99_s: float
    itl_p50_s: float
    itl_p99_s: float


def summarize(outcome: FleetRun, policy: RoutePolicy, nodes: int, prefill_nodes: int) -> Summary:
    """Returns the figures of a run."""
    flights = outcome.flights
    first = [flight.first for flight in flights]
    whole = [flight.whole for flight in flights]
    itl = [
        (flight.request.last - flight.request.first) / (flight.asked.output - 1)
        for flight in flights
        if flight.asked.output > 1
    ]
    return Summary(
        policy=policy,
        nodes=nodes,
        prefill_nodes=prefill_nodes,
        requests=len(flights),
        seconds=outcome.seconds,
        output_tok_s=sum(flight.asked.output for flight in flights) / outcome.seconds,
        hit_rate=sum(flight.cached for flight in flights)
        / sum(flight.asked.prompt for flight in flights),
        apart=sum(flight.cached_apart is not None for flight in flights) / len(flights),
        ttft_p50_s=_percentile(first, 50),
        ttft_p99_s=_percentile(first, 99),
        latency_p50_s=_percentile(whole, 50),
        latency_p99_s=_percentile(whole, 99),
        itl_p50_s=_percentile(itl, 50),
        itl_p99_s=_percentile(itl, 99),
    )


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else 0.0


def write_csv(path: Path, summaries: Sequence[Summary]) -> None:
    """Writes a line for each summary.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, Summary.__struct_fields__)
            writer.writeheader()
            writer.writerows(msgspec.structs.asdict(summary) for summary in summaries)
    except OSError as error:
        raise ConfigError(f"out: {error}", "out") from None
