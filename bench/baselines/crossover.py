"""Two caches beside each other, and the batches from which on blocks on demand win."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import msgspec

from quire.tools.bench.record import BenchRecord

WINS = {"memory_gb": operator.lt, "tok_s": operator.gt}
"""The comparison of a figure of blocks with the other cache's that holds where blocks win."""


def crossover(records: Sequence[BenchRecord]) -> BenchRecord:
    """Returns a record of the smallest batches from which on, at all larger ones too, blocks take
    less memory, and give more tokens per second. records: of batches that grow, named by them; one
    in which the other cache has no figure did not fit with it. What has no such batch is left
    out."""
    least = {}
    for name, wins in WINS.items():
        for record in reversed(records):
            blocks, reserved = (record.metrics.get(f"{k}_{name}") for k in ("quire", "contiguous"))
            if blocks is None or (reserved is not None and not wins(blocks, reserved)):
                break
            least[f"{name}_from"] = float(record.case.rpartition("-")[2])
    return msgspec.structs.replace(records[-1], case="contiguous-crossover", metrics=least)


def beside(found: dict[str, dict[str, float] | None]) -> dict[str, float]:
    """Returns the figures of two kinds, by name, and the first kind's over the second's. A kind
    without figures did not fit."""
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
