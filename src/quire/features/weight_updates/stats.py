"""The statistics of updates."""

from __future__ import annotations

import msgspec


class UpdateStats(msgspec.Struct):
    """Counts since the start.

    Attributes:
        version: Version of the weights.
        updates: Number of successful updates.
        failures: Number of failed updates.
        bytes: Bytes of all written tensors.
        seconds: Time of all writes, in which no step runs.
        incomplete: 1 after an update that failed while it wrote.
        asleep: 1 while memory is given up.
        stale_draft_updates: Number of updates since one reached the drafts' own weights.
    """

    version: int = 0
    updates: int = 0
    failures: int = 0
    bytes: int = 0
    seconds: float = 0.0
    incomplete: int = 0
    asleep: int = 0
    stale_draft_updates: int = 0


LIVE_ROWS = {
    "version": "Version of the weights",
    "updates": "Updates",
    "failures": "Failed updates",
    "bytes": "Bytes written",
    "seconds": "Time of the writes",
    "incomplete": "Weights are incomplete",
    "asleep": "Asleep",
    "stale_draft_updates": "Updates without the drafts' weights",
}
"""The names of the statistics in the live view."""
