"""Measures this CPU, and the reader's kernels on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from lessons import mine

SIDE, CONTEXT, HEADS, DIM = 5632, 32768, 8, 64
"""Sizes that no cache of a CPU holds."""


def seconds(work: Callable[[], Any]) -> float:
    """Returns the shortest time of some calls, as a busy machine disturbs most of them."""
    times: list[float] = []
    while len(times) < 4 or sum(times) < 0.3:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def machine() -> tuple[float, float]:
    """Measures bytes/s and FLOP/s of this CPU, by reading 128 MB and by a product of matrices."""
    large, square = torch.randn(SIDE, SIDE), torch.randn(1024, 1024)
    row = torch.randn(1, SIDE)
    reading = min(seconds(partial(F.linear, row, large)), seconds(large.sum))
    return large.nbytes / reading, 2 * 1024**3 / seconds(lambda: square @ square)


def kernels(model: mine.Model) -> dict[str, tuple[float, float]]:
    """Times the reader's kernels on this CPU. Returns FLOP/byte and FLOP/s of each, by name."""
    weight, found = torch.randn(SIDE, SIDE), {}
    for rows in (1, 4, 16, 64, 256):
        x = torch.randn(rows, SIDE)
        taken = seconds(partial(F.linear, x, weight))
        flops = 2 * rows * SIDE * SIDE
        found[f"product, {rows}"] = flops / (weight.nbytes + 2 * x.nbytes), flops / taken
    q, (k, v) = torch.randn(1, HEADS, DIM), torch.randn(2, CONTEXT, HEADS, DIM)
    taken = seconds(lambda: mine.attention(q, k, v))
    flops = 4 * CONTEXT * HEADS * DIM
    found["attention"] = flops / (k.nbytes + v.nbytes), flops / taken
    x, scale = torch.randn(CONTEXT, SIDE // 4), torch.ones(SIDE // 4)
    taken = seconds(lambda: model.rms_norm(x, scale))
    found["norm"] = 4 * x.numel() / (2 * x.nbytes), 4 * x.numel() / taken
    return found
