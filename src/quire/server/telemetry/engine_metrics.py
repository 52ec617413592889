"""Metrics from the engine's own statistics, which are read at each scrape."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from quire import __version__
from quire.features.disaggregation.stats import OUTCOMES, DisaggStats
from quire.features.expert_balance.stats import ExpertStats
from quire.server.telemetry.metrics import ServerMetrics

if TYPE_CHECKING:
    from quire.engine.loop.stats import EngineStats, RankStats
    from quire.features.kv_offload.stats import TierStats
    from quire.features.speculation.stats import SpeculationStats

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
    "steps": ("engine_steps", "Steps launched."),
    "prompt_tokens": ("engine_prompt_tokens", "Prompt tokens of all requests taken."),
    "generation_tokens": (
        "engine_generation_tokens",
        "Tokens computed, including those that no client was waiting for any more.",
    ),
    "broken_logits": ("broken_logits", "Completions that ended because their logits were NaN."),
}
"""Maps fields of `EngineStats` to their metrics' names and meanings."""

_ADAPTER_COUNTERS = {
    "loads": ("adapter_loads", "LoRA adapters copied to the device."),
    "load_seconds": ("adapter_load_seconds", "Seconds that all these copies took."),
    "failures": ("adapter_failures", "LoRA adapters that could not be read or copied."),
}
"""Maps entries of `EngineStats.adapters` in the same way. It is empty without LoRA."""

_TIER_COUNTERS = {
    "host_hit_tokens": ("host_hit_tokens", "Prompt tokens whose KV came from host memory."),
    "disk_hit_tokens": ("disk_hit_tokens", "Prompt tokens whose KV came from files."),
    "host_evictions": ("host_evicted_blocks", "KV blocks that host memory gave up to newcomers."),
    "disk_writes": ("disk_written_blocks", "KV blocks written to files."),
    "swapped_out": ("kv_blocks_out", "KV blocks copied from the device to the host."),
    "swapped_in": ("kv_blocks_in", "KV blocks copied from the host to the device."),
    "swapped_out_bytes": ("kv_bytes_out", "Bytes of KV copied from the device to the host."),
    "swapped_in_bytes": ("kv_bytes_in", "Bytes of KV copied from the host to the device."),
    "transfer_failures": ("kv_transfer_failures", "Moves of KV blocks between tiers that failed."),
}
"""Maps fields of `TierStats` in the same way. It exists if the cache has lower tiers."""

_PEER_COUNTERS = {
    "blocks_sent": ("kv_blocks_sent", "KV blocks sent to other engines."),
    "blocks_received": ("kv_blocks_received", "KV blocks received from other engines."),
    "bytes_sent": ("kv_bytes_sent", "Bytes of the KV blocks sent to other engines."),
    "bytes_received": ("kv_bytes_received", "Bytes of the KV blocks received from other engines."),
    "handover_seconds": (
        "kv_handover_seconds",
        "Seconds that prompts from other engines took in addition to their computation.",
    ),
    "ask_seconds": ("kv_ask_seconds", "Seconds until other engines accepted such requests."),
    "remote_tokens": ("remote_hit_tokens", "Prompt tokens whose KV came from other engines."),
    "local": (
        "kv_fetches_local",
        "Requests whose prompts this engine computed although a peer was chosen for them.",
    ),
    "readers_refused": (
        "kv_readers_refused",
        "Other engines that were refused: they did not match, or had no valid grant.",
    ),
}
"""Maps fields of `DisaggStats` in the same way. It exists if the engine has peers."""

_SOURCE_COUNTERS = {
    "rows": ("drafts", "Rows that verified drafts."),
    "drafted": ("draft_tokens", "Draft tokens verified."),
    "accepted": ("accepted_tokens", "Draft tokens accepted."),
}
"""Maps fields of `SourceStats` in the same way. It exists if the engine speculates."""


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
        yield _gauge("engine_up", "1 while the engine answers.", int(self.up))
        replicas = _gauge(
            "replica_up", "1 while the engine of data_parallel_size answers.", labels=("replica",)
        )
        for index, up in enumerate(self._replicas):
            replicas.add_metric([str(index)], int(up))
        yield replicas
        build = _gauge("build_info", "1; what runs is in its labels.", labels=tuple(self._build))
        build.add_metric(list(self._build.values()), 1)
        yield build
        if self._stats is not None:
            yield from _gauges(self._stats)
            yield from _counters(self._stats, _COUNTERS)
            yield from _histograms(self._stats)
            if self._stats.adapters:
                yield from _adapters(self._stats.adapters)
            if self._stats.tiers is not None:
                yield from _tiers(self._stats.tiers)
            if self._stats.disagg is not None:
                yield from _disagg(self._stats.disagg)
            if self._stats.speculation is not None:
                yield from _speculation(self._stats.speculation)
            if self._stats.ranks:
                yield from _ranks(self._stats.ranks)
            if self._stats.experts is not None:
                yield from _experts(self._stats.experts)


def _gauges(stats: EngineStats) -> Iterator[Metric]:
    yield _gauge("requests_running", "Requests that hold a lane and KV blocks.", stats.running)
    yield _gauge("requests_waiting", "Requests in the queue.", stats.waiting)
    yield _gauge("requests_swapped", "Requests in the queue that were preempted.", stats.set_back)
    blocks = _gauge("kv_blocks", "KV blocks, by group and state.", labels=("group", "state"))
    for state in ("used", "cached", "free"):
        for group, count in enumerate(getattr(stats, f"blocks_{state}")):
            blocks.add_metric([str(group), state], count)
    yield blocks


def _adapters(found: dict[str, float]) -> Iterator[Metric]:
    states = ("known", "cached", "resident")
    counts = _gauge("adapters", "LoRA adapters, by state.", labels=("state",))
    for state in states:
        counts.add_metric([state], found[state])
    yield counts
    yield _gauge(
        "adapter_requests_waiting",
        "Requests parked until their LoRA adapter is on the device.",
        found["waiting"],
    )
    for field, (name, help) in _ADAPTER_COUNTERS.items():
        yield CounterMetricFamily(f"quire_{name}", help, value=found[field])


def _tiers(tiers: TierStats) -> Iterator[Metric]:
    blocks = _gauge("tier_blocks", "KV blocks in lower tiers.", labels=("tier",))
    blocks.add_metric(["host"], tiers.host_blocks_used)
    blocks.add_metric(["disk"], tiers.disk_blocks)
    yield blocks
    yield from _counters(tiers, _TIER_COUNTERS)


def _disagg(found: DisaggStats) -> Iterator[Metric]:
    yield _gauge("kv_grants_open", "Prompts under way for other engines.", found.grants_open)
    yield _gauge("kv_fetches_open", "Prompts under way at other engines.", found.fetches_open)
    yield _gauge(
        "kv_slots_used", "Blocks in the memory between engines, out or in.", found.slots_used
    )
    yield _gauge("peers_up", "Peers that can be asked for prompts now.", found.peers_up)
    for name, help, counts in (
        ("kv_grants", "Prompts granted to other engines that ended, by outcome.", found.grants),
        ("kv_fetches", "Prompts asked of other engines that ended, by outcome.", found.fetches),
    ):
        metric = CounterMetricFamily(f"quire_{name}", help, labels=("outcome",))
        for outcome in OUTCOMES:
            metric.add_metric([outcome], counts.get(outcome, 0))
        yield metric
    yield from _counters(found, _PEER_COUNTERS)


def _speculation(found: SpeculationStats) -> Iterator[Metric]:
    stem = "spec_decode"
    yield _gauge(
        f"{stem}_drafts_per_row",
        "Drafts of a generating row, in the last step.",
        found.drafts_per_row,
    )
    yield _gauge(
        f"{stem}_gain", "Expected speed of the last step over one without drafts.", found.gain
    )
    for field, (name, help) in _SOURCE_COUNTERS.items():
        metric = CounterMetricFamily(f"quire_{stem}_{name}", help, labels=("source",))
        for source, counts in found.sources.items():
            metric.add_metric([source], getattr(counts, field))
        yield metric
    places = CounterMetricFamily(
        f"quire_{stem}_accepted_tokens_per_pos",
        "Draft tokens accepted, by their place in the row.",
        labels=("source", "position"),
    )
    for source, counts in found.sources.items():
        for position, count in enumerate(counts.accepted_at):
            places.add_metric([source, str(position)], count)
    yield places


def _ranks(ranks: Sequence[RankStats]) -> Iterator[Metric]:
    held = _gauge("rank_bytes", "Device memory, by what it is for.", labels=("rank", "kind"))
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


def _experts(stats: ExpertStats) -> Iterator[Metric]:
    work = CounterMetricFamily(
        "quire_expert_work", "Tokens that a rank's experts computed.", labels=("rank",)
    )
    work.add_metric(["most"], stats.most_work)
    work.add_metric(["mean"], stats.mean_work)
    yield work
    yield CounterMetricFamily("quire_expert_moves", "Copies that came to ranks.", value=stats.moves)


def _counters(stats: object, names: dict[str, tuple[str, str]]) -> Iterator[Metric]:
    for field, (name, help) in names.items():
        yield CounterMetricFamily(f"quire_{name}", help, value=getattr(stats, field))


def _histograms(stats: EngineStats) -> Iterator[Metric]:
    for field, (name, help) in _HISTOGRAMS.items():
        if field in stats.histograms:
            found = stats.histograms[field]
            bounds = [*map(floatToGoString, found.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(found.counts), strict=True))
            yield HistogramMetricFamily(
                f"quire_{name}", help, buckets=buckets, sum_value=found.total
            )


def _gauge(
    name: str, help: str, value: float | None = None, labels: tuple[str, ...] = ()
) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"quire_{name}", help, value, None if value is not None else labels)
