"""The statistics of updates."""

from __future__ import annotations

import msgspec


class UpdateStats(msgspec.Struct):
    """Counts since the start.

    Attributes:
        version: Version of the weights: their updates.
        updates: Updates that succeeded.
        failures: Updates that failed, before or after their first byte.
        bytes: Bytes of the tensors that were written.
        seconds: Seconds in which no step could run because weights were written.
        incomplete: 1 while weights are incomplete, because an update has failed.
        asleep: 1 while memory is given up.
        stale_draft_updates: Updates since the drafts' own weights were current; 0 without drafts
            of own weights.
    """

    version: int = 0
    updates: int = 0
    failures: int = 0
    bytes: int = 0
    seconds: float = 0.0
    incomplete: int = 0
    asleep: int = 0
    stale_draft_updates: int = 0
