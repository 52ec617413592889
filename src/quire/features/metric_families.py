"""Makes Prometheus metric families from a feature's statistics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


def counters(stats: object, names: dict[str, tuple[str, str]]) -> Iterator[Metric]:
    """Yields a counter for each field of the statistics, by its metric's name and meaning."""
    for field, (name, help) in names.items():
        yield CounterMetricFamily(f"quire_{name}", help, value=getattr(stats, field))


def gauge(
    name: str, help: str, value: float | None = None, labels: tuple[str, ...] = ()
) -> GaugeMetricFamily:
    """Returns a gauge. If it has labels, the caller adds its values."""
    return GaugeMetricFamily(f"quire_{name}", help, value, None if value is not None else labels)
