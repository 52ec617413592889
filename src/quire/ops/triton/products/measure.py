"""Times calls on a GPU inside a CUDA graph, and searches for the fastest plan of a product."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

P = TypeVar("P")

GAIN = 0.98
"""A plan replaces the plan by rules only if it takes less than this fraction of its time. Smaller
gains are noise."""


@dataclass(frozen=True, slots=True)
class Measured(Generic[P]):
    """The time of a plan.

    Attributes:
        plan: the plan.
        us: time per launch in µs, infinite if the plan fails.
        error: the reason for which the plan fails, or "".
    """

    plan: P
    us: float
    error: str = ""


def search(
    rules: P, stages: Iterable[Callable[[list[Measured[P]]], Iterable[P]]],
    measure: Callable[[P], Measured[P]],
) -> list[Measured[P]]:  # fmt: skip
    """Returns the measurements of the plan by rules, then those of other plans by time.

    Args:
        stages: functions that return the plans to try next. They get all measurements so far, the
            plan by rules first. A plan is measured once.
        measure: measures a plan.
    """
    found = [measure(rules)]
    for stage in stages:
        tried = {measured.plan for measured in found}
        found += [measure(plan) for plan in dict.fromkeys(stage(found)) if plan not in tried]
    return [found[0], *by_time(found[1:])]


def by_time(found: Iterable[Measured[P]]) -> list[Measured[P]]:
    return sorted(found, key=lambda measured: measured.us)


def preferred(found: Sequence[Measured[P]]) -> Measured[P] | None:
    """Returns the fastest of a shape's measurements, or None if no plan could be timed.

    The first measurement is the plan by rules, which is kept unless another is fast enough."""
    rules, *others = found
    best = min(others, key=lambda measured: measured.us, default=rules)
    best = best if best.us < GAIN * rules.us else rules
    return best if math.isfinite(best.us) else None


def graph_us(
    calls: Sequence[Callable[[], object]], us_guess: float, stream: torch.cuda.Stream
) -> float:
    """Returns the time per call in a CUDA graph of `calls`, in µs.

    It is the best of three replays of about a millisecond each.

    Args:
        us_guess: rough estimate of the µs of a call.
        stream: stream of the capture.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for call in calls:  # Kernels compile and cuBLAS takes its workspace before the capture.
            call()
        stream.synchronize()
        # Threads of a process group may call the device during the capture.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
        graph.replay()
        repeats = max(2, round(1000.0 / (us_guess * len(calls))))
        best = math.inf
        for _ in range(3):
            start, end = torch.cuda.Event(True), torch.cuda.Event(True)
            start.record()
            for _ in range(repeats):
                graph.replay()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) * 1e3 / repeats)
    return best / len(calls)
