"""Masks that are kept for requests that come to a place in a document again."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from quire.arrays import Int32

_STATES_A_MASK = 8
"""States to keep for each dense mask that there is room for."""
_SPARSE = 8
"""A mask of which at most one word in so many is not 0 is kept as these words."""
_OVERHEAD = 256
"""Bytes that a mask takes beside its words."""
_MOST_TRIED = 1024
"""Lookups after which a grammar's share of hits decides."""
_LEAST_HITS = 0.3
_ANY = -1

Piece = bytes | tuple[int, object]
"""Text behind a place, or the end of a value."""


class _Kept(NamedTuple):
    """A mask.

    Attributes:
        words: int32; all words, or those that are not 0.
        at: int64, the indices of `words`; None: they are all.
        left: See `MaskMemory.keep`.
    """

    words: Int32
    at: np.ndarray[tuple[int], np.dtype[np.int64]] | None
    left: int

    @property
    def nbytes(self) -> int:
        return _OVERHEAD + self.words.nbytes + (0 if self.at is None else self.at.nbytes)


class _Base(NamedTuple):
    """The tokens allowed in a string, for at most so many characters left."""

    left: int
    mask: Int32


class GrammarUse:
    """Counts the lookups of one grammar.

    Attributes:
        root: The state of an empty document.
        lookups: Number of lookups.
        hits: Number of lookups that found a mask.
    """

    __slots__ = ("hits", "lookups", "root")

    def __init__(self, root: int) -> None:
        self.root = root
        self.lookups = self.hits = 0

    @property
    def pays(self) -> bool:
        """Whether lookups find enough masks to be worth their time."""
        return self.lookups < _MOST_TRIED or self.hits >= _LEAST_HITS * self.lookups


class MaskMemory:
    """Keeps the masks of places in documents, up to a number of bytes. Belongs to one thread.

    A place is a state, and the text behind it. States are numbered: equal ones by the state before
    and what came then. Where a grammar forces text, the last token belongs to the place, because
    llguidance looks at it when it splits that text into tokens.

    Args:
        limit: Bytes of masks to keep.

    Attributes:
        lookups: Number of lookups.
        hits: Number of lookups that found a mask.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = self._count = 0
        self._states: dict[tuple[int, Piece], int] = {}
        self._masks: OrderedDict[tuple[int, bytes, int], _Kept] = OrderedDict()
        """By state, text and last token, the least recently used first."""
        self._bases: dict[int, _Base] = {}
        self._uses: dict[bytes, GrammarUse] = {}
        self.lookups = self.hits = 0

    def use(self, grammar: bytes) -> GrammarUse:
        """Returns the counts of a grammar."""
        found = self._uses.get(grammar)
        if found is None:
            found = self._uses[grammar] = GrammarUse(self.step(-1, grammar))
        return found

    def step(self, state: int, piece: Piece) -> int:
        """Returns the state after one more piece."""
        key = state, piece
        found = self._states.get(key)
        if found is None:
            self._count += 1
            found = self._states[key] = self._count
        return found

    def recall(
        self, use: GrammarUse, state: int, text: bytes, last: int, left: int, into: Int32
    ) -> bool:
        """Writes the mask of a place if it is known. into: int32 [words]. Others as of `keep`."""
        self.lookups += 1
        use.lookups += 1
        for key in ((state, text, _ANY), (state, text, last)):
            kept = self._masks.get(key)
            if kept is None or kept.left < left:
                continue
            self._masks.move_to_end(key)
            self.hits += 1
            use.hits += 1
            if kept.at is None:
                into[:] = kept.words
            else:
                into[:] = 0
                into[kept.at] = kept.words
            return True
        return False

    def keep(
        self,
        state: int,
        text: bytes,
        last: int | None,
        left: int,
        mask: Int32,
        *,
        dense: bool = True,
    ) -> None:
        """Keeps a copy of a mask, int32 [words].

        Args:
            last: The last token, if it matters.
            left: Characters that may still come here. The mask has what a place with fewer has.
            dense: Whether a mask of many tokens is worth its bytes.
        """
        at = np.flatnonzero(mask)
        sparse = len(at) * _SPARSE <= len(mask)
        if not sparse and not dense:
            return
        kept = _Kept(mask[at], at, left) if sparse else _Kept(mask.copy(), None, left)
        key = state, text, _ANY if last is None else last
        before = self._masks.pop(key, None)
        if before is not None:
            self._bytes -= before.nbytes
        self._masks[key] = kept
        self._bytes += kept.nbytes
        self._shrink(mask.nbytes)

    def base(self, state: int, left: int) -> Int32 | None:
        """Returns the tokens allowed in the string that begins at a state (`StringTables.base`).

        Args:
            left: Characters left in the string.
        """
        found = self._bases.get(state)
        return None if found is None or found.left < left else found.mask

    def keep_base(self, state: int, left: int, mask: Int32) -> None:
        """Keeps what `StringTables.base` has returned."""
        if state not in self._bases:
            self._bytes += mask.nbytes
        self._bases[state] = _Base(left, mask)
        self._shrink(mask.nbytes)

    def _shrink(self, dense: int) -> None:
        """Forgets masks beyond the limit. dense: bytes of a dense mask."""
        while self._bytes > self._limit and self._masks:
            self._bytes -= self._masks.popitem(last=False)[1].nbytes
        if self._bytes > self._limit or len(self._states) > _STATES_A_MASK * max(
            1, self._limit // dense
        ):
            # Numbers are never used twice, so a document that goes on finds nothing wrong.
            self._states.clear()
            self._masks.clear()
            self._bases.clear()
            self._uses.clear()
            self._bytes = 0
