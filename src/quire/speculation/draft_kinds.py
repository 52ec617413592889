"""Kinds of drafts, by where they come from. How often each is accepted is learned apart."""

from __future__ import annotations

import numpy as np

from quire.arrays import Int32, int32
from quire.speculation.draft_count import Flags

NONE, DEVICE, MASKED, TREE, LOOKUP = range(5)
"""NONE: no drafts. DEVICE: the source's on the device. MASKED: the same for rows under a grammar,
which the source knows nothing of. TREE: of a text in the prefix tree that begins with all of the
row's. LOOKUP: of a text that has a match with the row's end, a kind for each class of lengths."""

_CLASSES = int32([2, 3, 4, 6, 8, 12, 16, 24])
"""The least length of each class but the first."""
NUM_KINDS = LOOKUP + len(_CLASSES) + 1


def lookup_kind(length: int) -> int:
    """Returns the kind of drafts of a match of so many tokens."""
    return LOOKUP + int(np.searchsorted(_CLASSES, length, side="right"))


def by_device(kinds: Int32) -> Flags:
    """Returns which kinds of drafts the source on the device makes, bool [n]."""
    found: Flags = (kinds == DEVICE) | (kinds == MASKED)
    return found
