"""Searches texts for continuations of other texts.

The index is that of a match finder in LZ77 compressors. A table maps every run of a few tokens to
the place where it last ended. A list maps each place to the previous one with the same run. Adding
a token costs one entry, and finding a continuation costs a few comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quire.arrays import Int32, int32
from quire.cache import BlockManager
from quire.cache.block_hash import Namespace
from quire.cache.continuation import continuation
from quire.features.speculation.draft_count import Flags
from quire.features.speculation.settings import NONE, TREE, SpeculationSettings, lookup_kind
from quire.plan import DRAFT_IDS, DRAFT_START
from quire.request import Request
from quire.scheduler import PlanBuilder

_FACTOR = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_CANDIDATES = 8
"""Most places that are compared, the latest first."""


class TextMatch(NamedTuple):
    """A place in an indexed text after which a continuation begins. length: number of tokens before
    the place that match."""

    text: TextIndex
    place: int
    length: int


class TextIndex:
    """An index of a growing text, to find continuations of other texts or of the text itself.

    Args:
        least: fewest tokens of a match.
        most: most tokens to compare.
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
            # A place is the position of the token after its run.
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
        """Returns a place after which the text may continue `tokens`, int32 [n].

        The place is after the longest run that is also the end of `tokens`; among equally long
        ones, the latest. None: there is no such run.
        """
        if len(tokens) < self._least:
            return None
        place = self._last.get(self._key(tokens), 0)
        best, found = self._least - 1, None
        for _ in range(_CANDIDATES):
            if not place:
                break
            if place < self._count:  # The end of the text has no continuation.
                length = self._agreeing(tokens, place)
                if length > best:
                    best, found = length, TextMatch(self, place, length)
                if best >= min(self._most, len(tokens)):
                    break
            place = int(self._before[place - 1])
        return found

    def _agreeing(self, tokens: Int32, place: int) -> int:
        """Returns how many tokens before a place match the end of `tokens`."""
        most = min(self._most, place, len(tokens))
        own, other = tokens[len(tokens) - most :], self._tokens[place - most : place]
        differing = np.flatnonzero(own != other)
        return most if not len(differing) else most - 1 - int(differing[-1])

    def after(self, place: int, count: int) -> Int32:
        """Returns the tokens after a place, int32 [at most `count`]."""
        return int32(self._tokens[place : min(place + count, self._count)])


class RecentTexts:
    """Texts of ended requests of one namespace. The oldest are forgotten.

    Args:
        least: fewest tokens of a match.
        compared: most tokens to compare.
        most: tokens to keep at least. Up to twice as many are kept.
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


# Drafts by lookup: continuations of texts that begin like a row's text, or match its end.

_LOOKUPS = 64
"""Most rows whose texts are searched in a step."""
_RECENT = 1 << 20
"""Tokens of ended requests that a namespace keeps at least. All namespaces together keep at most
twice as many, which is also the limit of one namespace."""
_NAMESPACES = 64


class _Text:
    """A running request's text, which is searched for matches of its own end.

    Attributes:
        match: the place of its continuation; None: no lookup has found one.
        ahead: its continuation in the prefix tree.
    """

    __slots__ = ("ahead", "index", "match", "request")

    def __init__(self, request: Request, least: int, most: int) -> None:
        self.request = request
        self.index = TextIndex(least, most, room=request.known + 64)
        self.match: TextMatch | None = None
        self.ahead: Int32 = int32([])

    def update(self) -> Int32:
        """Takes in new tokens. Returns all known tokens as the model reads them, int32 [known]."""
        tokens = self.request.as_read(self.request.tokens.view())
        self.index.extend(tokens[len(self.index) :])
        return tokens


class TextSource:
    """Searches the prefix tree, the row's own text, and texts of ended requests.

    Args:
        width: number of tokens of a claim.
        vocab_size: ids from this one on stand for something else than tokens, and are not drafted.
    """

    def __init__(
        self, settings: SpeculationSettings, lanes: int, width: int, vocab_size: int = 2**31 - 1
    ) -> None:
        self._settings = settings
        self._width = width
        self._vocab_size = vocab_size
        self._texts: list[_Text | None] = [None] * lanes
        self._recent: dict[Namespace, RecentTexts] = {}
        self._tree: BlockManager | None = None
        self._next = 0

    def attach(self, blocks: BlockManager) -> None:
        self._tree = blocks if blocks.caching else None

    def look_up(self, lanes: Int32, wanted: Flags, requests: Sequence[Request | None]) -> Int32:
        """Finds continuations for rows. If there are many, rows take turns.

        Args:
            lanes: lanes of the rows, int32 [n].
            wanted: rows that need a continuation, bool [n].
            requests: requests by lane.

        Returns:
            The kinds of drafts that were found, int32 [n].
        """
        kinds = np.zeros_like(lanes)
        places = np.flatnonzero(wanted)
        if len(places) > _LOOKUPS:
            first = self._next % len(places)
            self._next = first + _LOOKUPS
            places = np.roll(places, -first)[:_LOOKUPS]
        for place in places.tolist():
            lane = int(lanes[place])
            request = requests[lane]
            if request is not None:
                kinds[place] = self._match(lane, request)
        return kinds

    def _match(self, lane: int, request: Request) -> int:
        """Finds a continuation of a row's text. Returns its kind."""
        settings, text = self._settings, self._texts[lane]
        if text is None or text.request is not request:
            text = _Text(request, settings.lookup_min, settings.lookup_max)
            self._texts[lane] = text
        tokens = text.update()
        if self._tree is not None:
            # A text with the same beginning predicts the continuation best.
            last, size = self._tree.lanes.last(lane), self._tree.block_size
            ahead = continuation(last, request.tokens.view(), size, self._width)
            text.ahead = ahead[: int(np.append(ahead < self._vocab_size, False).argmin())]
            if len(text.ahead):
                return TREE
        tail = tokens[max(0, len(tokens) - settings.lookup_max) :]
        text.match = text.index.find(tail)
        if text.match is None or text.match.length < settings.lookup_max:
            recent = self._recent.get(request.namespace)
            other = None if recent is None else recent.find(tail)
            if other is not None and (text.match is None or other.length > text.match.length):
                text.match = other
        return NONE if text.match is None else lookup_kind(text.match.length)

    def claim(self, builder: PlanBuilder, lanes: Int32) -> None:
        """Writes the continuations that were found for these lanes as their claims."""
        if not len(lanes):
            return
        ids = np.full((len(lanes), self._width), -1, dtype=np.int32)
        starts = np.zeros_like(lanes)
        for line, lane in enumerate(lanes.tolist()):
            text = self._texts[lane]
            if text is None:
                continue
            found = text.ahead
            if text.match is not None and not len(found):
                index, place, _ = text.match
                found = index.after(place, self._width)
                if index is text.index:
                    # The text probably repeats the part from the match to its end.
                    found = np.resize(found, self._width)
            ids[line, : len(found)] = found
            starts[line] = text.request.known
        builder.write(DRAFT_IDS, lanes, ids)
        builder.write(DRAFT_START, lanes, starts)

    def finish(self, request: Request) -> None:
        """Keeps a request's text for lookups of other requests. If there are too many namespaces,
        it drops those in which no request has ended for longest."""
        for lane, text in enumerate(self._texts):
            if text is not None and text.request is request:
                self._texts[lane] = None
        if request.mixed or not self._settings.lookup or not request.num_output_tokens:
            return
        start = max(0, request.prompt_len - self._settings.lookup_max)
        recent = self._recent.pop(request.namespace, None)
        if recent is None:
            recent = RecentTexts(self._settings.lookup_min, self._settings.lookup_max, _RECENT)
        self._recent[request.namespace] = recent
        recent.add(request.as_read(request.tokens.view())[start:])
        kept = sum(map(len, self._recent.values()))
        while len(self._recent) > 1 and (kept > 2 * _RECENT or len(self._recent) > _NAMESPACES):
            kept -= len(self._recent.pop(next(iter(self._recent))))

    def forget(self) -> None:
        self._recent.clear()
