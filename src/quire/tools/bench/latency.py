"""Measures one request at a time: until the first token, between tokens, and until the last one.

Times are taken when the engine in this process delivers tokens. A server would add its own time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.errors import ConfigError
from quire.tools.bench.cases import Workload, random_prompt
from quire.tools.bench.gpu_meter import GpuMeter, Metrics
from quire.tools.bench.throughput import QuireEngine
from quire.tools.bench.trace import SeenStep
from quire.tools.bench.work import percentiles


@dataclass(frozen=True, slots=True)
class Timeline:
    """Latencies of one request, in milliseconds.

    Attributes:
        ttft: until the first token.
        gaps: between tokens.
        total: until the last token.
    """

    ttft: float
    gaps: list[float]
    total: float


def check_lengths(inputs: Sequence[int], outputs: Sequence[int], max_model_len: int) -> None:
    longest = max(inputs) + max(outputs)
    if longest > max_model_len:
        raise ConfigError(
            f"input_len and output_len add up to {longest} tokens, but max_model_len is "
            f"{max_model_len}",
            "input_len",
        )


def case_name(input_len: int, output_len: int) -> str:
    return f"latency-{input_len}x{output_len}"


def measure(
    engine: QuireEngine, input_len: int, output_len: int, *, requests: int, meter: GpuMeter
) -> Metrics:
    """Returns percentiles over `requests` requests with different prompts, after a warm-up request.

    Percentiles of gaps are over all tokens of all requests.

    Args:
        meter: meter of the engine's GPUs.
    """
    draw = random.Random(0)
    _one(engine, draw, input_len, output_len)
    with meter.reading() as reading:
        lines = [_one(engine, draw, input_len, output_len) for _ in range(requests)]
    return summary(lines, output_len) | reading.metrics(requests * output_len)


def summary(lines: Sequence[Timeline], output_len: int) -> Metrics:
    """Returns the metrics of the requests. With one output token there are no `itl` metrics."""
    metrics: Metrics = {"requests": len(lines)}
    metrics |= _spread("ttft", [line.ttft for line in lines], 50, 95)
    gaps = [gap for line in lines for gap in line.gaps]
    if gaps:
        metrics |= _spread("itl", gaps, 50, 95, 99)
    metrics |= _spread("e2e", [line.total for line in lines], 50, 95)
    metrics["output_tok_s"] = output_len * 1e3 / metrics["e2e_p50_ms"]
    return metrics


def _spread(name: str, values: Sequence[float], *wanted: int) -> Metrics:
    found = percentiles(values, *wanted)
    return {f"{name}_p{at}_ms": value for at, value in zip(wanted, found, strict=True)}


def _one(engine: QuireEngine, draw: random.Random, input_len: int, output_len: int) -> Timeline:
    prompt = random_prompt(draw, input_len, engine.vocab_size)
    run = engine.prepare(Workload([prompt], [output_len], {"temperature": 0.0}))
    began = time.perf_counter()
    run()
    total = time.perf_counter() - began
    return timeline(engine.trace.take(), began, total)


def timeline(steps: Sequence[SeenStep], began: float, seconds: float) -> Timeline:
    """Returns the latencies of a request from its steps. Tokens of one step have no gap between
    them.
    """
    arrivals = np.repeat(
        [step.collected for step in steps], [int(step.n_tokens.sum()) for step in steps]
    )
    gaps = np.diff(arrivals) * 1e3
    return Timeline((float(arrivals[0]) - began) * 1e3, gaps.tolist(), seconds * 1e3)
