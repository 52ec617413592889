"""Compares two caches, and finds the batches from which blocks on demand win."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import msgspec

from quire.tools.bench.record import BenchRecord

WINS = {"memory_gb": operator.lt, "tok_s": operator.gt}
"""The comparison of a figure of blocks with the other cache's that holds where blocks win."""


def crossover(records: Sequence[BenchRecord]) -> BenchRecord:
    """Returns the smallest batch from which on blocks win, in memory and in tokens per second.

    Blocks win from a batch on if they win at every larger batch, too. A figure without such a
    batch is left out.

    Args:
        records: records of growing batches. A record without a figure of the contiguous cache
            means that the batch did not fit in it.
    """
    least = {}
    for name, wins in WINS.items():
        for record in reversed(records):
            blocks, reserved = (record.metrics.get(f"{k}_{name}") for k in ("quire", "contiguous"))
            if blocks is None or (reserved is not None and not wins(blocks, reserved)):
                break
            least[f"{name}_from"] = float(record.case.rpartition("-")[2])
    return msgspec.structs.replace(records[-1], case="contiguous-crossover", metrics=least)


def beside(found: dict[str, dict[str, float] | None]) -> dict[str, float]:
    """Returns the figures of two kinds by name, and their ratios, first over second.

    A kind without figures did not fit the memory.
    """
    metrics = {
        f"{kind}_{name}": value
        for kind, values in found.items()
        for name, value in (values or {}).items()
    }
    for name in ("memory_gb", "tok_s"):
        first, second = (metrics.get(f"{kind}_{name}") for kind in found)
        if first and second:
            metrics[f"{name}_ratio"] = first / second
    return metrics
