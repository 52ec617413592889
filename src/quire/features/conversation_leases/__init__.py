"""Conversation leases keep open conversations' KV: other cached prefixes are evicted first."""

from quire.features.spec import FeatureSpec

_HERE = "quire.features.conversation_leases"

FEATURE = FeatureSpec(
    name="conversation_leases",
    args=f"{_HERE}.args:LeaseArgs",
    loop=f"{_HERE}.feature:ConversationLeases",
    serves=True,
    calls=f"{_HERE}.calls:CALLS",
    fields=f"{_HERE}.calls:FIELDS",
    stats=f"{_HERE}.stats:LeaseStats",
    stats_name="conversation_leases",
    live_rows=f"{_HERE}.stats:LIVE_ROWS",
    metrics=f"{_HERE}.stats:collect",
)
