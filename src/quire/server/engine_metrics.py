"""The engine's own numbers, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import Gauge
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from quire.server.metrics import ServerMetrics

if TYPE_CHECKING:
    from quire.engine.core import EngineStats

_COUNTERS = {
    "prefix_query_tokens": ("prefix_query_tokens", "Prompt tokens looked up in the prefix cache."),
    "prefix_hit_tokens": ("prefix_hit_tokens", "Of them, found."),
    "preemptions": ("preemptions", "Requests set back to make room for others."),
    "swapped": ("swapped", "Of them, to be brought back rather than computed again."),
    "steps": ("engine_steps", "Steps launched."),
    "prompt_tokens": ("engine_prompt_tokens", "Prompt tokens of all requests taken."),
    "generation_tokens": (
        "engine_generation_tokens",
        "Tokens computed, those that nobody waited for any more included.",
    ),
}
"""Fields of `EngineStats`: their metrics' names and meanings."""

_TIER_COUNTERS = {
    "host_hit_tokens": ("host_hit_tokens", "Prompt tokens whose KV came from host memory."),
    "disk_hit_tokens": ("disk_hit_tokens", "Prompt tokens whose KV came from files."),
    "host_evictions": ("host_evicted_blocks", "KV blocks that host memory gave up to newcomers."),
    "disk_writes": ("disk_written_blocks", "KV blocks written to files."),
    "swapped_out": ("kv_blocks_out", "KV blocks copied from the device to the host."),
    "swapped_in": ("kv_blocks_in", "KV blocks copied from the host to the device."),
    "swapped_out_bytes": ("kv_bytes_out", "Bytes of these."),
    "swapped_in_bytes": ("kv_bytes_in", "Bytes of these."),
    "transfer_failures": ("kv_transfer_failures", "Moves of KV blocks between tiers that failed."),
}
"""Fields of `TierStats`, likewise; there where there are lower tiers."""


class EngineMetrics:
    """Gauges of the engine's state, and its counters, which are reported as they come: the engine
    does the counting."""

    def __init__(self, metrics: ServerMetrics) -> None:
        def gauge(name: str, help: str, labels: tuple[str, ...] = ()) -> Gauge:
            # Every process asks the same engine.
            return Gauge(
                f"quire_{name}",
                help,
                labels,
                registry=metrics.registry,
                multiprocess_mode="mostrecent",
            )

        self.up = gauge("engine_up", "1 while the engine answers.")
        self.running = gauge("requests_running", "Requests that hold a lane and KV blocks.")
        self.waiting = gauge("requests_waiting", "Requests in the queue.")
        self.blocks = gauge("kv_blocks", "KV blocks, by group and state.", ("group", "state"))
        self.tiers = gauge("tier_blocks", "KV blocks in lower tiers.", ("tier",))
        self.counts = dict.fromkeys(_COUNTERS, 0)
        metrics.engine = _Counters(self.counts)
        metrics.registry.register(metrics.engine)

    def update(self, stats: EngineStats, *, up: bool) -> None:
        self.up.set(int(up))
        self.running.set(stats.running)
        self.waiting.set(stats.waiting)
        for state in ("used", "cached", "free"):
            for group, count in enumerate(getattr(stats, f"blocks_{state}")):
                self.blocks.labels(str(group), state).set(count)
        for name in _COUNTERS:
            self.counts[name] = getattr(stats, name)
        if stats.tiers is not None:
            self.tiers.labels("host").set(stats.tiers.host_blocks_used)
            self.tiers.labels("disk").set(stats.tiers.disk_blocks)
            self.counts |= {name: getattr(stats.tiers, name) for name in _TIER_COUNTERS}


class _Counters(Collector):
    def __init__(self, counts: dict[str, int]) -> None:
        self.counts = counts

    def collect(self) -> Iterator[CounterMetricFamily]:
        for field, (name, help) in (_COUNTERS | _TIER_COUNTERS).items():
            if field in self.counts:
                yield CounterMetricFamily(f"quire_{name}", help, value=self.counts[field])
