"""Metrics of adapters."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from quire.features.lora.stats import AdapterStats
from quire.features.metric_families import gauge

_ADAPTER_COUNTERS = {
    "loads": ("adapter_loads", "LoRA adapters copied to the device."),
    "load_seconds": ("adapter_load_seconds", "Seconds that this took in all."),
    "failures": ("adapter_failures", "LoRA adapters that could not be read or copied."),
}


def collect(found: AdapterStats) -> Iterator[Metric]:
    """Yields the metric families of the statistics."""
    states = ("known", "cached", "resident")
    counts = gauge("adapters", "LoRA adapters, by state.", labels=("state",))
    for state in states:
        counts.add_metric([state], found[state])
    yield counts
    yield gauge(
        "adapter_requests_waiting",
        "Requests parked until their LoRA adapter is on the device.",
        found["waiting"],
    )
    for field, (name, help) in _ADAPTER_COUNTERS.items():
        yield CounterMetricFamily(f"quire_{name}", help, value=found[field])
