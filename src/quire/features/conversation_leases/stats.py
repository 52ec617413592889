"""The statistics of conversation leases, and their metrics."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from prometheus_client.core import Metric

from quire.features.metric_families import counters, gauge


class LeaseStats(msgspec.Struct):
    """Present numbers, and counts since the start.

    Attributes:
        leases: Conversations with a lease.
        blocks: Blocks under leases.
        expired: Leases that ended because no turn came.
        given_up: Leases that ended because newer ones needed their share.
    """

    leases: int = 0
    blocks: int = 0
    expired: int = 0
    given_up: int = 0


LIVE_ROWS = {
    "leases": "Conversations with a lease",
    "blocks": "Blocks under leases",
    "expired": "Leases that expired",
    "given_up": "Leases given up for newer ones",
}
"""The names of the statistics in the live view."""


def collect(stats: LeaseStats) -> Iterator[Metric]:
    """Yields the metric families of the statistics."""
    yield gauge("conversation_leases", "Open conversations with a lease.", stats.leases)
    yield gauge("conversation_lease_blocks", "KV blocks under leases.", stats.blocks)
    names = {
        "expired": ("conversation_leases_expired", "Leases that ended because no turn came."),
        "given_up": ("conversation_leases_given_up", "Leases that newer ones replaced."),
    }
    yield from counters(stats, names)
