"""The drafts that a claim gives to a row, as the device finds them."""

from __future__ import annotations

import numpy as np

from quire.arrays import Int32, int32


def claimed_drafts(ids: Int32, start: int, tokens: Int32, most: int) -> Int32:
    """Returns the draft tokens that a claim gives to a row, int32 [at most `most`].

    ids: int32 [W], the claimed tokens from position `start` on, padded with -1. tokens: int32
    [known], the tokens that the row knows.
    """
    covered = len(tokens) - start
    if start < 0 or not 0 <= covered <= len(ids) or (ids[:covered] != tokens[start:]).any():
        return int32([])
    drafts = ids[covered:][: max(most, 0)]
    ends = np.flatnonzero(drafts < 0)
    return drafts[: ends[0]] if len(ends) else drafts
