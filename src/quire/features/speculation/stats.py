"""The statistics of speculation."""

from __future__ import annotations

import msgspec


class SourceStats(msgspec.Struct):
    """Counts of one source since the start.

    rows: rows that verified its drafts. drafted: draft tokens verified. accepted: of them, those
    that were drawn. accepted_at: the same by place in the row, the first draft first.
    """

    rows: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = []


class SpeculationStats(msgspec.Struct):
    """steps: launched with drafts. drafts_per_row: of the last step, over all generating rows.
    gain: of the last step, the expected speed over that of a step without drafts. sources: by
    name."""

    steps: int = 0
    drafts_per_row: float = 0.0
    gain: float = 1.0
    sources: dict[str, SourceStats] = {}
