"""The statistics of an engine, and their sums over several engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_origin

import msgspec

from quire.engine.loop.telemetry import Histogram
from quire.features.registry import clash_error, installed_features
from quire.features.spec import resolve


class RankStats(msgspec.Struct):
    """The statistics of one of several ranks.

    Attributes:
        steps: Steps that it has read.
        device_seconds: The device's time for these steps, with waits for other ranks.
        weight_bytes: Size of its weights.
        kv_bytes: Size of its KV cache.
    """

    steps: int = 0
    device_seconds: float = 0.0
    weight_bytes: int = 0
    kv_bytes: int = 0


class CoreStats(msgspec.Struct):
    """Block counts are per KV group; counters count since the start.

    Attributes:
        set_back: Waiting requests that were preempted.
        evicted_blocks: Blocks evicted from the device's cache.
        copied_blocks: Blocks copied because they are shared only in part.
        swapped: Preemptions after which a feature restores the blocks.
        late_rows: Rows that missed a step because their masks came late.
        delay_seconds: Seconds of all requests, by what they went to; see `DelayClock`.
        prompt_tokens: Prompt tokens of accepted requests.
        generation_tokens: Generated tokens read from the device.
        broken_logits: Completions that ended because their logits were not numbers.
        ranks: Statistics of each rank; empty for a single rank.
        histograms: See `Telemetry`.
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
    late_rows: int = 0
    delay_seconds: dict[str, float] = {}
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    broken_logits: int = 0
    ranks: list[RankStats] = []
    histograms: dict[str, Histogram] = {}


if TYPE_CHECKING:

    class EngineStats(CoreStats):
        """The engine's statistics and those of features, by the names that features declare."""

        def __init__(self, **counts: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

else:

    def _feature_fields() -> list[tuple[str, Any, Any]]:
        """Returns the fields of features' statistics. Without statistics a field is None or {}."""
        found = []
        for spec in installed_features():
            if spec.stats_name in CoreStats.__struct_fields__:
                raise clash_error("statistics", spec.stats_name, "the engine", spec.origin)
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


# Sums over several engines.


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
