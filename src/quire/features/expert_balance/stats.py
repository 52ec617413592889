"""The statistics of experts with copies."""

from __future__ import annotations

import msgspec


class ExpertStats(msgspec.Struct):
    """Counts over all layers, as of when experts were last looked at.

    most_work, mean_work: tokens that a rank's experts had to compute, a token's experts each
    counted: of each layer's rank with most, and of its mean rank.
    moves: copies that have come to ranks since the start.
    """

    most_work: float = 0.0
    mean_work: float = 0.0
    moves: int = 0
