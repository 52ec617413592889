"""Metrics of updates."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from quire.features.metric_families import gauge
from quire.features.weight_updates.stats import UpdateStats

_COUNTERS = {
    "updates": ("weight_updates", "Updates of the weights."),
    "failures": ("weight_update_failures", "Updates of the weights that failed."),
    "bytes": ("weight_update_bytes", "Bytes of the tensors that updates have written."),
    "seconds": ("weight_update_seconds", "Seconds that steps waited for updates."),
}
_GAUGES = {
    "version": ("weights_version", "Version of the weights, the number of their updates."),
    "incomplete": ("weights_incomplete", "1 after an update that failed while it wrote."),
    "stale_draft_updates": (
        "draft_weights_stale",
        "Updates of the weights since those of the draft model or head were current.",
    ),
}


def collect(found: UpdateStats) -> Iterator[Metric]:
    """Yields the metric families of the statistics."""
    for field, (name, help) in _COUNTERS.items():
        yield CounterMetricFamily(f"quire_{name}", help, value=getattr(found, field))
    for field, (name, help) in _GAUGES.items():
        yield gauge(name, help, getattr(found, field))
