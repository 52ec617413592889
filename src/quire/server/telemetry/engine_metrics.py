"""Metrics from the engine's own statistics, which are read at each scrape."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from quire import __version__
from quire.features.metric_families import counters, gauge
from quire.features.registry import installed_features
from quire.features.spec import resolve
from quire.server.telemetry.metrics import ServerMetrics

if TYPE_CHECKING:
    from quire.engine.loop.stats import EngineStats, RankStats

_COUNTERS = {
    "prefix_query_tokens": ("prefix_query_tokens", "Prompt tokens looked up in the prefix cache."),
    "prefix_hit_tokens": ("prefix_hit_tokens", "Prompt tokens found in the prefix cache."),
    "evicted_blocks": ("kv_blocks_evicted", "KV blocks that the prefix cache gave up."),
    "copied_blocks": (
        "kv_blocks_copied",
        "KV blocks copied because only their first part is shared.",
    ),
    "preemptions": ("preemptions", "Preemptions of requests to make room for others."),
    "swapped": ("swapped", "Preemptions whose KV was kept, so that it is not computed again."),
    "late_rows": ("late_rows", "Rows that sat a step out because their masks came late."),
    "steps": ("engine_steps", "Steps launched."),
    "prompt_tokens": ("engine_prompt_tokens", "Prompt tokens of all requests taken."),
    "generation_tokens": (
        "engine_generation_tokens",
        "Tokens computed, including those that no client was waiting for any more.",
    ),
    "broken_logits": ("broken_logits", "Completions that ended because their logits were NaN."),
}
"""Maps fields of `EngineStats` to their metrics' names and meanings."""

_HISTOGRAMS = {
    "step_seconds": (
        "engine_step_seconds",
        "Seconds of a step, from its launch or the end of the previous step to its end.",
    ),
    "step_device_seconds": ("engine_step_device_seconds", "Seconds of a step on the device."),
    "step_requests": ("engine_step_requests", "Requests in a step."),
    "step_tokens": ("engine_step_tokens", "Tokens in a step."),
    "prefill_seconds": (
        "request_prefill_seconds",
        "Seconds from a request's first step to its first token.",
    ),
}
"""Maps histograms of `EngineStats` in the same way."""


class EngineMetrics(Collector):
    """Collects the engine's latest statistics, summed over several engines."""

    def __init__(
        self, metrics: ServerMetrics, model: str, dtype: str = "", kv_cache_dtype: str = ""
    ) -> None:
        self.up = False
        self._stats: EngineStats | None = None
        self._replicas: Sequence[bool] = ()
        self._build = {
            "version": __version__,
            "python": platform.python_version(),
            "torch": importlib.metadata.version("torch"),
            "model": model,
            "dtype": dtype,
            "kv_cache_dtype": kv_cache_dtype,
        }
        metrics.collect_from(self)

    def update(self, stats: EngineStats, *, replicas: Sequence[bool]) -> None:
        """Stores new statistics.

        Args:
            stats: statistics, summed over the engines.
            replicas: for each engine, whether it answers.
        """
        self.up = any(replicas)
        self._replicas = replicas
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        yield gauge("engine_up", "1 while the engine answers.", int(self.up))
        replicas = gauge(
            "replica_up", "1 while the engine of data_parallel_size answers.", labels=("replica",)
        )
        for index, up in enumerate(self._replicas):
            replicas.add_metric([str(index)], int(up))
        yield replicas
        build = gauge("build_info", "1; what runs is in its labels.", labels=tuple(self._build))
        build.add_metric(list(self._build.values()), 1)
        yield build
        if self._stats is not None:
            yield from _gauges(self._stats)
            yield from counters(self._stats, _COUNTERS)
            yield from _histograms(self._stats)
            yield _delays(self._stats.delay_seconds)
            if self._stats.ranks:
                yield from _ranks(self._stats.ranks)
            for spec in installed_features():
                found = getattr(self._stats, spec.stats_name) if spec.metrics else None
                if found:
                    yield from resolve(spec.metrics)(found)


def _gauges(stats: EngineStats) -> Iterator[Metric]:
    yield gauge("requests_running", "Requests that hold a lane and KV blocks.", stats.running)
    yield gauge("requests_waiting", "Requests in the queue.", stats.waiting)
    yield gauge("requests_swapped", "Requests in the queue that were preempted.", stats.set_back)
    blocks = gauge("kv_blocks", "KV blocks, by group and state.", labels=("group", "state"))
    for state in ("used", "cached", "free"):
        for group, count in enumerate(getattr(stats, f"blocks_{state}")):
            blocks.add_metric([str(group), state], count)
    yield blocks


def _delays(seconds: dict[str, float]) -> Metric:
    found = CounterMetricFamily(
        "quire_request_delay_seconds",
        "Seconds of requests in the engine, by what they waited for or did.",
        labels=("cause",),
    )
    for cause, total in seconds.items():
        found.add_metric([cause], total)
    return found


def _ranks(ranks: Sequence[RankStats]) -> Iterator[Metric]:
    held = gauge("rank_bytes", "Device memory, by what it is for.", labels=("rank", "kind"))
    steps = CounterMetricFamily("quire_rank_steps", "Steps read.", labels=("rank",))
    seconds = CounterMetricFamily(
        "quire_rank_step_seconds",
        "The device's time that they took, waits for other ranks included.",
        labels=("rank",),
    )
    for rank, stats in enumerate(ranks):
        held.add_metric([str(rank), "weights"], stats.weight_bytes)
        held.add_metric([str(rank), "kv"], stats.kv_bytes)
        steps.add_metric([str(rank)], stats.steps)
        seconds.add_metric([str(rank)], stats.device_seconds)
    yield from (held, steps, seconds)


def _histograms(stats: EngineStats) -> Iterator[Metric]:
    for field, (name, help) in _HISTOGRAMS.items():
        if field in stats.histograms:
            found = stats.histograms[field]
            bounds = [*map(floatToGoString, found.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(found.counts), strict=True))
            yield HistogramMetricFamily(
                f"quire_{name}", help, buckets=buckets, sum_value=found.total
            )
