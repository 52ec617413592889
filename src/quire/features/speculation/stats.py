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


_DRAFTERS = {
    "draft": "the draft model",
    "mtp": "the MTP layer",
    "eagle3": "the EAGLE-3 head",
    "tree": "the prefix tree",
    "suffix": "lookups",
}
_COUNTS = {
    "rows": "Rows with drafts of {}",
    "drafted": "Drafts of {} verified",
    "accepted": "Drafts of {} accepted",
    "accepted_at": "Drafts of {} accepted, all places",
}
LIVE_ROWS = {
    "steps": "Steps with drafts",
    "drafts_per_row": "Drafts of a row, in the last step",
    "gain": "Speed expected of the last step, over one without drafts",
    **{
        f"sources.{source}.{count}": text.format(name)
        for source, name in _DRAFTERS.items()
        for count, text in _COUNTS.items()
    },
}
"""The names of the statistics in the live view."""
