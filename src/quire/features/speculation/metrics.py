"""Metrics of speculation."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from quire.features.metric_families import gauge
from quire.features.speculation.stats import SpeculationStats

_SOURCE_COUNTERS = {
    "rows": ("drafts", "Rows that verified drafts."),
    "drafted": ("draft_tokens", "Draft tokens verified."),
    "accepted": ("accepted_tokens", "Draft tokens accepted."),
}


def collect(found: SpeculationStats) -> Iterator[Metric]:
    """Yields the metric families of the statistics."""
    stem = "spec_decode"
    yield gauge(
        f"{stem}_drafts_per_row",
        "Drafts of a generating row, in the last step.",
        found.drafts_per_row,
    )
    yield gauge(
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
