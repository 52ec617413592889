"""The statistics, and the metric that shows them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from prometheus_client.core import Metric

from quire.features.metric_families import counters


class ConstantTokenStats(msgspec.Struct):
    """Counts since the start. completions: number of finished completions with a repeated token."""

    completions: int = 0


LIVE_ROWS = {"completions": "Completions of one token"}
"""The name of the statistic in the live view."""


def collect(stats: ConstantTokenStats) -> Iterator[Metric]:
    """Yields the families of the statistics."""
    names = {"completions": ("constant_token_completions", "Completions of one token.")}
    yield from counters(stats, names)
