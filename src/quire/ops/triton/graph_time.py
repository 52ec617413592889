"""The time of calls on a GPU, as they run inside a captured step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch


def graph_us(
    calls: Sequence[Callable[[], object]], us_guess: float, stream: torch.cuda.Stream
) -> float:
    """Returns the µs per call of a graph of `calls`, replayed for about a millisecond, the best of
    three. us_guess: about what a call takes. stream: where it is captured."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for call in calls:  # compile, load, let cuBLAS take its workspace before the capture
            call()
        stream.synchronize()
        # Threads of a process group may ask the device meanwhile.
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
