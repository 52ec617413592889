"""Masks kept for requests whose schema came before."""

from __future__ import annotations

import threading
from collections import OrderedDict

from quire.arrays import Int32

_STATES_A_MASK = 8
"""States to keep for each mask that there is room for."""

Piece = int | bytes
"""A token, or the text of a token without what stands in strings of free text."""


class MaskMemory:
    """Keeps the masks of places in documents, up to a number of bytes.

    The place is known by the document's text before it. Strings that only their length bounds are
    left out, because nothing after such a string depends on its text. The last token belongs to the
    place, because llguidance looks at it when it splits forced text into tokens. Thread-safe.

    Args:
        limit: Bytes of masks to keep.

    Attributes:
        lookups: Number of lookups.
        hits: Number of lookups that found a mask.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._lock = threading.Lock()
        self._count = 0
        self._states: dict[tuple[int, Piece], int] = {}
        """Numbers of states, by the state before and what came then."""
        self._masks: OrderedDict[tuple[int, int], Int32] = OrderedDict()
        """By state and last token, the least recently used first."""
        self.lookups = self.hits = 0

    def root(self, grammar: bytes) -> int:
        """Returns the state of an empty document of a grammar."""
        return self.step(-1, grammar)

    def step(self, state: int, piece: Piece) -> int:
        """Returns the state after one more piece."""
        key = state, piece
        found = self._states.get(key)
        if found is None:
            with self._lock:
                self._count += 1
                # Another thread may have been here first.
                found = self._states.setdefault(key, self._count)
        return found

    def get(self, state: int, last: int) -> Int32 | None:
        """Returns the mask of a place, int32 [words], or None."""
        key = state, last
        with self._lock:
            self.lookups += 1
            mask = self._masks.get(key)
            if mask is not None:
                self.hits += 1
                self._masks.move_to_end(key)
            return mask

    def put(self, state: int, last: int, mask: Int32) -> None:
        """Keeps a copy of a mask."""
        with self._lock:
            key, copy = (state, last), mask.copy()
            if key in self._masks:
                return
            self._masks[key] = copy
            self._bytes += copy.nbytes
            while self._bytes > self._limit:
                self._bytes -= self._masks.popitem(last=False)[1].nbytes
            if len(self._states) > _STATES_A_MASK * max(1, self._limit // copy.nbytes):
                # Numbers are never used twice, so a document that goes on finds nothing wrong.
                self._states.clear()
                self._masks.clear()
                self._bytes = 0
