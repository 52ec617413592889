"""Metrics of redundant experts."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from quire.features.expert_balance.stats import ExpertStats


def collect(stats: ExpertStats) -> Iterator[Metric]:
    """Yields the metric families of the statistics."""
    work = CounterMetricFamily(
        "quire_expert_work", "Tokens that a rank's experts computed.", labels=("rank",)
    )
    work.add_metric(["most"], stats.most_work)
    work.add_metric(["mean"], stats.mean_work)
    yield work
    yield CounterMetricFamily(
        "quire_expert_moves", "Experts copied from one rank to another.", value=stats.moves
    )
