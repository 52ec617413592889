"""Time of a call on the device, as it runs inside a captured step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Without a GPU only the checks run, under TRITON_INTERPRET=1."""
L2_BYTES = 64 << 20
"""A little more than an H200's L2. Buffers that rotate over more come from memory."""


def graph_us(
    calls: Sequence[Callable[[], object]], target_ms: float = 4.0, at_least: int = 32
) -> float:
    """Returns the µs per call of a CUDA graph that runs the calls one after the other.

    Calls on different buffers keep L2 as cold as the rest of a model would.

    Args:
        target_ms: time of a measurement.
        at_least: calls in the graph; the given ones repeat.
    """
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    repeats = max(1, at_least // len(calls))
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    count = repeats * len(calls)
    once = _replay_ms(graph, 1)
    replays = max(2, min(50, round(target_ms / max(once, 1e-3))))
    best = min(_replay_ms(graph, replays) for _ in range(3))
    return best * 1e3 / (replays * count)


def _replay_ms(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def copies_beyond_l2(bytes_each: int, most: int = 64) -> int:
    """Returns how many buffers of a size to rotate over."""
    return max(2, min(most, -(-2 * L2_BYTES // max(bytes_each, 1))))
