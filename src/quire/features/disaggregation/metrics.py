"""Metrics of transfers between engines."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from quire.features.disaggregation.stats import OUTCOMES, DisaggStats
from quire.features.metric_families import counters, gauge

_PEER_COUNTERS = {
    "blocks_sent": ("kv_blocks_sent", "KV blocks that other engines took."),
    "blocks_received": ("kv_blocks_received", "KV blocks that came from other engines."),
    "bytes_sent": ("kv_bytes_sent", "Bytes of the KV blocks that other engines took."),
    "bytes_received": ("kv_bytes_received", "Bytes of the KV blocks from other engines."),
    "handover_seconds": (
        "kv_handover_seconds",
        "Seconds that prompts from other engines took, without the time to compute them.",
    ),
    "ask_seconds": ("kv_ask_seconds", "Seconds until other engines agreed to compute prompts."),
    "remote_tokens": ("remote_hit_tokens", "Prompt tokens whose KV came from other engines."),
    "local": (
        "kv_fetches_local",
        "Requests that computed their prompts here because a fetch failed.",
    ),
    "readers_refused": (
        "kv_readers_refused",
        "Readers that did not match this engine, or had no valid grant.",
    ),
}


def collect(found: DisaggStats) -> Iterator[Metric]:
    """Yields the families of the statistics."""
    yield gauge("kv_grants_open", "Open grants of prompts to other engines.", found.grants_open)
    yield gauge("kv_fetches_open", "Open fetches from other engines.", found.fetches_open)
    yield gauge("kv_slots_used", "Used slots of the memory between engines.", found.slots_used)
    yield gauge("peers_up", "Peers that can be asked for prompts now.", found.peers_up)
    for name, help, counts in (
        ("kv_grants", "Prompts granted to other engines that ended, by outcome.", found.grants),
        ("kv_fetches", "Prompts asked of other engines that ended, by outcome.", found.fetches),
    ):
        metric = CounterMetricFamily(f"quire_{name}", help, labels=("outcome",))
        for outcome in OUTCOMES:
            metric.add_metric([outcome], counts.get(outcome, 0))
        yield metric
    yield from counters(found, _PEER_COUNTERS)
