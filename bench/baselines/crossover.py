"""The batches from which on blocks on demand win over memory reserved at full length."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import msgspec

from quire.bench.record import BenchRecord

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
