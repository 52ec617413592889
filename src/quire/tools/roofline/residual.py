"""Measures on an engine the figures that `roofline` predicts for a case."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.plan import RowFlag
from quire.tools.bench.cases import TTFT, TTFT_LENGTHS, Case, Workload
from quire.tools.bench.gpu_meter import GpuMeter, Metrics
from quire.tools.bench.throughput import QuireEngine, measure
from quire.tools.bench.trace import SeenStep
from quire.tools.roofline.roofline import Prediction

_RUNS = 2
"""Number of runs of a case. The fastest one counts."""


@dataclass(frozen=True, slots=True)
class MeasuredCase:
    """The measured figures of a case. A figure that was not measured is None.

    Attributes:
        case: see `Prediction`.
        seconds: see `Prediction`.
        output_tok_s: see `Prediction`.
        decode_seconds: see `Prediction`.
        first_token_seconds: see `Prediction`.
        weight_bytes: see `Prediction`.
        kv_bytes: bytes of the most blocks that requests held at once.
        gpus: see `Reading.metrics`.
    """

    case: str
    seconds: float | None
    output_tok_s: float | None
    decode_seconds: float | None
    first_token_seconds: float
    weight_bytes: int | None
    kv_bytes: int | None
    gpus: Metrics


def run_case(engine: QuireEngine, case: Case, meter: GpuMeter) -> list[MeasuredCase]:
    """Runs a case. For `ttft` it returns one result for each length of prompt.

    Args:
        engine: an engine without a prefix cache.
        meter: meter of its GPUs.
    """
    weights = weight_bytes(engine)
    if case is TTFT:
        found = measure(engine, case)
        engine.trace.take()
        return [
            MeasuredCase(
                f"ttft {n}", None, None, None, found[f"ttft_{n}_ms"] / 1e3, weights, None, {}
            )
            for n in TTFT_LENGTHS
            if f"ttft_{n}_ms" in found
        ]
    work = case.workload(engine.vocab_size)
    few = work.prompts[:4]
    engine.prepare(Workload(few, [8] * len(few), work.sampling))()
    return [
        min(
            (_run(engine, case.name, work, meter, weights) for _ in range(_RUNS)),
            key=lambda each: each.seconds or math.inf,
        )
    ]


def _run(
    engine: QuireEngine, name: str, work: Workload, meter: GpuMeter, weights: int | None
) -> MeasuredCase:
    run = engine.prepare(work)
    with meter.reading() as reading:
        began = time.perf_counter()
        run()
        seconds = time.perf_counter() - began
    steps = engine.trace.take()
    groups = engine.llm._core.capacity.groups
    return MeasuredCase(
        case=name,
        seconds=seconds,
        output_tok_s=work.output_tokens / seconds,
        decode_seconds=decode_seconds(steps),
        first_token_seconds=last_first_token(steps) - began,
        weight_bytes=weights,
        kv_bytes=max(
            sum(n * group.block_bytes for n, group in zip(step.used, groups, strict=True))
            for step in steps
        ),
        gpus=reading.metrics(work.output_tokens),
    )


def decode_seconds(steps: Sequence[SeenStep]) -> float | None:
    """Returns the mean time of the steps in which all rows decode, or None without such steps.

    A step's time is from the end of the step before it to its own end."""
    gaps = [
        step.collected - before.collected
        for before, step in itertools.pairwise(steps)
        if not (step.plan.flags & RowFlag.PROMPT).any()
    ]
    return sum(gaps) / len(gaps) if gaps else None


def last_first_token(steps: Sequence[SeenStep]) -> float:
    """Returns the time at which the last request got its first token, by `time.perf_counter`."""
    return max(
        step.collected
        for step in steps
        if (((step.plan.flags & RowFlag.PROMPT) != 0) & (step.n_tokens > 0)).any()
    )


def weight_bytes(engine: QuireEngine) -> int | None:
    """Returns the bytes of the engine's weights, or None if other processes hold them."""
    model: Any = getattr(engine.trace.inner, "model", None)
    if model is None:
        return None
    # Tied weights are one tensor.
    sizes = {part.data_ptr(): part.numel() * part.dtype.itemsize for part in model.parameters()}
    return int(sum(sizes.values()))


def residuals(predicted: Prediction, found: MeasuredCase) -> dict[str, float]:
    """Returns 100 x (predicted / measured - 1) for each measured figure."""
    names = (
        "output_tok_s", "decode_seconds", "first_token_seconds", "weight_bytes", "kv_bytes"
    )  # fmt: skip
    pairs = {name: (getattr(predicted, name), getattr(found, name)) for name in names}
    return {name: 100.0 * (a / b - 1.0) for name, (a, b) in pairs.items() if a and b}
