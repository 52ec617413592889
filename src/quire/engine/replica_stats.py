"""The statistics of several engines as those of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.engine.stats import EngineStats
from quire.engine.telemetry import Histogram


def added(stats: Sequence[EngineStats]) -> EngineStats:
    """Returns the sums of all counts, block counts per KV group."""
    total: EngineStats = _sum(list(stats))
    return total


def _sum(values: list[Any]) -> Any:
    first = values[0]
    if first is None:
        return None
    if isinstance(first, Histogram):
        counts = _sum([value.counts for value in values])
        return Histogram(first.bounds, counts, sum(value.total for value in values))
    if isinstance(first, list):
        return [_sum(list(entries)) for entries in zip(*values, strict=True)]
    if isinstance(first, dict):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: _sum([value[name] for value in values if name in value]) for name in names}
    if isinstance(first, msgspec.Struct):
        fields = first.__struct_fields__
        return type(first)(**{n: _sum([getattr(value, n) for value in values]) for n in fields})
    return sum(values)
