"""Texts that are searched for how another one may go on.

The index is that of a match finder in LZ77 compressors: a table from every run of a few tokens to
the place where it ended last, and from each place to the one before with the same run. Adding a
token is one entry, finding a continuation a few comparisons.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quire.arrays import Int32, int32

_FACTOR = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_CANDIDATES = 8
"""Places that are compared, the latest first."""


class TextMatch(NamedTuple):
    """A place in an indexed text behind which it went on. length: tokens before it that agree."""

    text: TextIndex
    place: int
    length: int


class TextIndex:
    """A growing text in which the continuation of another, or of itself, is looked up.

    least: tokens that a match must have. most: tokens that are compared.
    """

    def __init__(self, least: int, most: int, room: int = 256) -> None:
        self._least, self._most = least, most
        self._tokens: Int32 = np.empty(room, dtype=np.int32)
        self._before: Int32 = np.empty(room, dtype=np.int32)
        self._count = 0
        self._last: dict[int, int] = {}

    def __len__(self) -> int:
        return self._count

    def extend(self, tokens: Int32) -> None:
        """Appends tokens, int32 [n]."""
        start, end = self._count, self._count + len(tokens)
        if end > len(self._tokens):
            self._tokens = np.resize(self._tokens, max(end, 2 * len(self._tokens)))
            self._before = np.resize(self._before, len(self._tokens))
        self._tokens[start:end] = tokens
        self._count = end
        first = max(start, self._least - 1)
        if end - first < _CANDIDATES:
            keys = [self._key(self._tokens[: place + 1]) for place in range(first, end)]
        else:
            keys = self._keys(first, end)
        last, before = self._last, self._before
        for place, key in enumerate(keys, first):
            # A place is known by the position of the token behind its run.
            before[place] = last.get(key, 0)
            last[key] = place + 1

    def _keys(self, first: int, end: int) -> list[int]:
        """Returns the keys of the runs that end at each of these positions."""
        keys = np.zeros(end - first, dtype=np.uint64)
        for back in range(self._least - 1, -1, -1):
            part = self._tokens[first - back : end - back].astype(np.uint64)
            keys = keys * np.uint64(_FACTOR) + part + np.uint64(1)
        found: list[int] = keys.tolist()
        return found

    def _key(self, tokens: Int32) -> int:
        key = 0
        for token in tokens[len(tokens) - self._least :].tolist():
            key = (key * _FACTOR + token + 1) & _MASK
        return key

    def find(self, tokens: Int32) -> TextMatch | None:
        """Returns where the text went on as `tokens`, int32 [n], may: behind the longest run that
        is the end of `tokens`, the latest of equals. None: such a run does not occur."""
        if len(tokens) < self._least:
            return None
        place = self._last.get(self._key(tokens), 0)
        best, found = self._least - 1, None
        for _ in range(_CANDIDATES):
            if not place:
                break
            if place < self._count:  # not the end of the text itself
                length = self._agreeing(tokens, place)
                if length > best:
                    best, found = length, TextMatch(self, place, length)
                if best >= min(self._most, len(tokens)):
                    break
            place = int(self._before[place - 1])
        return found

    def _agreeing(self, tokens: Int32, place: int) -> int:
        """Returns how many tokens before a place are the end of `tokens`."""
        most = min(self._most, place, len(tokens))
        own, other = tokens[len(tokens) - most :], self._tokens[place - most : place]
        differing = np.flatnonzero(own != other)
        return most if not len(differing) else most - 1 - int(differing[-1])

    def after(self, place: int, count: int) -> Int32:
        """Returns the tokens behind a place, int32 [at most `count`]."""
        return int32(self._tokens[place : min(place + count, self._count)])


class RecentTexts:
    """Texts of ended requests of one namespace; the oldest are forgotten.

    most: tokens to keep, at least; up to twice as many are kept.
    """

    def __init__(self, least: int, compared: int, most: int) -> None:
        self._least, self._compared, self._most = least, compared, most
        self._young = TextIndex(least, compared)
        self._old: TextIndex | None = None

    def __len__(self) -> int:
        return len(self._young) + (0 if self._old is None else len(self._old))

    def add(self, tokens: Int32) -> None:
        """Adds a text, int32 [n]."""
        if len(self._young) + len(tokens) > self._most and len(self._young):
            self._old, self._young = self._young, TextIndex(self._least, self._compared)
        self._young.extend(tokens)

    def find(self, tokens: Int32) -> TextMatch | None:
        """See `TextIndex.find`."""
        found = self._young.find(tokens)
        if self._old is not None and (found is None or found.length < self._compared):
            older = self._old.find(tokens)
            if older is not None and (found is None or older.length > found.length):
                return older
        return found
