"""Three exercises on kernels and graphs.

python -m lessons check 5
"""

from __future__ import annotations

from torch import Tensor


def merge(largest: Tensor, totals: Tensor, seen: Tensor) -> Tensor:
    """Joins what programs found that each attended to a part of the keys of one query.

    largest: float [parts], the largest score of each. totals: float [parts], the sum of exp(score -
    largest). seen: float [parts, dim], the sum of exp(score - largest) * value.
    Returns the attention over all keys, float [dim].
    """
    raise NotImplementedError


def add_norm_bytes(rows: int, width: int, itemsize: int, fused: bool) -> int:
    """Returns the bytes that a sum and its norm read and write: total = x + residual, and out =
    total / rms(total) * weight.

    fused: one kernel, which keeps total in registers. Else two: the first reads x and residual and
    writes total; the second reads total and writes out. Both kinds leave total and out in memory.
    The weight is read once.
    """
    raise NotImplementedError


def bucket(rows: int, captured: list[int]) -> tuple[int, float] | None:
    """Returns the smallest captured graph that holds a step's rows, and the share of its rows that
    are padding; None if no graph holds them.

    captured: the numbers of rows for which there is a graph, in any order.
    """
    raise NotImplementedError
