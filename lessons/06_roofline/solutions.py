"""Solutions of the exercises on the roofline."""

from __future__ import annotations


def ridge_rows(bandwidth: float, rate: float, itemsize: int) -> float:
    """Returns the rows of a step from which on products wait for arithmetic, not for memory."""
    return rate * itemsize / (2 * bandwidth)


def decode_seconds(
    weight_bytes: float, kv_bytes: float, lengths: list[int], bandwidth: float
) -> float:
    """Returns the least time of a decode step that waits for memory."""
    return (weight_bytes + kv_bytes * sum(lengths)) / bandwidth


def most_rows(
    memory: float, weight_bytes: float, kv_bytes: float, length: int, bandwidth: float, itl: float
) -> int:
    """Returns the most rows of `length` tokens that fit the memory, and whose decode step takes at
    most `itl` seconds. 0 if not even one can."""
    each = kv_bytes * length
    fit = (memory - weight_bytes) // each
    fast = (itl * bandwidth - weight_bytes) // each
    return max(0, int(min(fit, fast)))
