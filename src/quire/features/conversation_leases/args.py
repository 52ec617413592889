"""The settings of conversation leases."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config import POSITIVE, FeatureArgs, Limit, setting

_SUBJECT = "Device and memory"


@dataclass(frozen=True, kw_only=True)
class LeaseArgs(FeatureArgs):
    """The share of the cache that leases may hold, and their time."""

    conversation_leases: float = setting(
        0.25,
        "Share of the KV cache that open conversations may keep for their next turn.",
        limit=Limit(lambda share: 0.0 <= share <= 1.0, "in [0, 1]"),
        subject=_SUBJECT,
    )
    conversation_lease_seconds: float = setting(
        600.0,
        "Seconds without a turn after which a conversation keeps nothing.",
        limit=POSITIVE,
        subject=_SUBJECT,
    )
