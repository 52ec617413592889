"""The statistics of an engine, and of several as those of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_origin

import msgspec

from quire.engine.loop.features import all_features
from quire.engine.loop.telemetry import Histogram
from quire.features.spec import resolve


class RankStats(msgspec.Struct):
    """One of several ranks. steps: that it has read. device_seconds: the device's time that these
    took, waits for other ranks included. weight_bytes, kv_bytes: what it holds."""

    steps: int = 0
    device_seconds: float = 0.0
    weight_bytes: int = 0
    kv_bytes: int = 0


class CoreStats(msgspec.Struct):
    """Block counts are per KV group; counters count since the start.

    set_back: waiting requests that ran before.
    prompt_tokens: of requests taken. generation_tokens: read from the device.
    broken_logits: completions that ended as their logits were not numbers.
    evicted_blocks: evicted from the device's cache. copied_blocks: shared only in part.
    swapped: preemptions after which blocks were to be brought back rather than computed again.
    ranks: empty where there is one. histograms: see `Telemetry`.
    """

    running: int = 0
    waiting: int = 0
    set_back: int = 0
    blocks_total: list[int] = []
    blocks_used: list[int] = []
    blocks_cached: list[int] = []
    blocks_free: list[int] = []
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    evicted_blocks: int = 0
    copied_blocks: int = 0
    preemptions: int = 0
    swapped: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    broken_logits: int = 0
    ranks: list[RankStats] = []
    histograms: dict[str, Histogram] = {}


if TYPE_CHECKING:

    class EngineStats(CoreStats):
        """The engine's statistics and, by the names that features declare, those of features."""

        def __init__(self, **counts: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

else:

    def _feature_fields() -> list[tuple[str, Any, Any]]:
        """Returns the fields of features' statistics; None, or an empty dict, without any."""
        found = []
        for spec in all_features():
            if spec.stats:
                kind = resolve(spec.stats)
                table = get_origin(kind) is dict
                found.append(
                    (spec.stats_name, kind if table else kind | None, {} if table else None)
                )
        return found

    EngineStats = msgspec.defstruct(
        "EngineStats", _feature_fields(), bases=(CoreStats,), module=__name__
    )


# The statistics of several engines as those of one.


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
