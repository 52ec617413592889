"""The statistics of speculation."""

from __future__ import annotations

import msgspec


class SourceStats(msgspec.Struct):
    """Counts of one source since the start.

    Attributes:
        rows: Rows that verified its drafts.
        drafted: Verified draft tokens.
        accepted: Accepted draft tokens.
        accepted_at: Accepted draft tokens by place in the row, the first draft first.
    """

    rows: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = []


class SpeculationStats(msgspec.Struct):
    """Counts of all sources since the start.

    Attributes:
        steps: Launched steps with drafts.
        drafts_per_row: Mean over the generating rows of the last step.
        gain: Expected speed of the last step, relative to a step without drafts.
        sources: Counts of each source, by name.
    """

    steps: int = 0
    drafts_per_row: float = 0.0
    gain: float = 1.0
    sources: dict[str, SourceStats] = {}
