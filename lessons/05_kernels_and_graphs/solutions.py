"""Solutions of the exercises on kernels and graphs."""

from __future__ import annotations

from torch import Tensor


def merge(largest: Tensor, totals: Tensor, seen: Tensor) -> Tensor:
    """Joins what programs found that each attended to a part of the keys of one query."""
    scale = (largest - largest.max()).exp()
    total: Tensor = (scale * totals).sum()
    return (scale[:, None] * seen).sum(0) / total


def add_norm_bytes(rows: int, width: int, itemsize: int, fused: bool) -> int:
    """Returns the bytes that a sum and its norm read and write: total = x + residual, and out =
    total / rms(total) * weight."""
    passes = 4 if fused else 5
    return itemsize * (passes * rows * width + width)


def bucket(rows: int, captured: list[int]) -> tuple[int, float] | None:
    """Returns the smallest captured graph that holds a step's rows, and the share of its rows that
    are padding; None if no graph holds them."""
    fitting = [size for size in captured if size >= rows]
    if not fitting:
        return None
    size = min(fitting)
    return size, 1 - rows / size
