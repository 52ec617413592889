"""Metrics of the lower tiers."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from quire.features.kv_offload.stats import TierStats
from quire.features.metric_families import counters, gauge

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


def collect(tiers: TierStats) -> Iterator[Metric]:
    """Yields the metric families of the statistics."""
    blocks = gauge("tier_blocks", "KV blocks in lower tiers.", labels=("tier",))
    blocks.add_metric(["host"], tiers.host_blocks_used)
    blocks.add_metric(["disk"], tiers.disk_blocks)
    yield blocks
    yield from counters(tiers, _TIER_COUNTERS)
