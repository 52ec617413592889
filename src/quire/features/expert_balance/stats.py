"""The statistics of redundant experts."""

from __future__ import annotations

import msgspec


class ExpertStats(msgspec.Struct):
    """Counts over all layers, at the last call of `rearrange`.

    Attributes:
        most_work: tokens of the rank with the most work of each layer. A token counts once for
            each of its experts.
        mean_work: mean of all ranks, counted in the same way.
        moves: experts that were copied from one rank to another since the start.
    """

    most_work: float = 0.0
    mean_work: float = 0.0
    moves: int = 0


LIVE_ROWS = {
    "most_work": "Tokens of the busiest rank",
    "mean_work": "Tokens of a rank, mean",
    "moves": "Experts moved",
}
"""The names of the statistics in the live view."""
