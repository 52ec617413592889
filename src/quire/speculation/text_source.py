"""Drafts that are looked up: how a row's text may go on, by texts that begin or repeat like it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.arrays import Int32, int32
from quire.cache import BlockManager
from quire.cache.continuation import continuation
from quire.plan import DRAFT_IDS, DRAFT_START
from quire.request import Request
from quire.scheduler import PlanBuilder
from quire.speculation.draft_count import Flags
from quire.speculation.draft_kinds import NONE, TREE, lookup_kind
from quire.speculation.lookup import RecentTexts, TextIndex, TextMatch
from quire.speculation.settings import SpeculationSettings

_LOOKUPS = 64
"""Rows whose texts are searched in a step."""
_RECENT = 1 << 20
"""Tokens of ended requests that are searched in a namespace, at least; all namespaces together keep
twice as many, the most that one of them may."""
_NAMESPACES = 64


class _Text:
    """A running request's own text, searched for its own end.

    match: where the text seems to go on, if a lookup has found something. ahead: what the prefix
    tree has behind it.
    """

    __slots__ = ("ahead", "index", "match", "request")

    def __init__(self, request: Request, least: int, most: int) -> None:
        self.request = request
        self.index = TextIndex(least, most, room=request.known + 64)
        self.match: TextMatch | None = None
        self.ahead: Int32 = int32([])

    def update(self) -> Int32:
        """Takes in what has come; returns all known tokens, int32 [known]."""
        tokens = self.request.tokens.view()
        self.index.extend(tokens[len(self.index) :])
        return tokens


class TextSource:
    """Searches the prefix tree, the row's own text, and texts of ended requests.

    width: tokens of a claim.
    """

    def __init__(self, settings: SpeculationSettings, lanes: int, width: int) -> None:
        self._settings = settings
        self._width = width
        self._texts: list[_Text | None] = [None] * lanes
        self._recent: dict[tuple[int, str], RecentTexts] = {}
        self._tree: BlockManager | None = None
        self._next = 0

    def attach(self, blocks: BlockManager) -> None:
        self._tree = blocks if blocks.caching else None

    def look_up(self, lanes: Int32, wanted: Flags, requests: Sequence[Request | None]) -> Int32:
        """Finds continuations for rows, those that were longest without a look first.

        lanes: int32 [n]. wanted: rows to find some for, bool [n]. requests: by lane.
        Returns their kinds, int32 [n].
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
        """Finds how a row's text may go on; returns the kind of what was found."""
        settings, text = self._settings, self._texts[lane]
        if text is None or text.request is not request:
            text = _Text(request, settings.lookup_min, settings.lookup_max)
            self._texts[lane] = text
        tokens = text.update()
        if self._tree is not None:
            # Of several texts that go on, one that begins like this one says most.
            last, size = self._tree.lanes.last(lane), self._tree.block_size
            text.ahead = continuation(last, tokens, size, self._width)
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
        """Writes what was found for the rows of these lanes as their claims."""
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
                    # The text repeats what lies between the match and its end, as far as one knows.
                    found = np.resize(found, self._width)
            ids[line, : len(found)] = found
            starts[line] = text.request.known
        builder.write(DRAFT_IDS, lanes, ids)
        builder.write(DRAFT_START, lanes, starts)

    def finish(self, request: Request) -> None:
        """Keeps what was generated for others to follow, in place of namespaces in which no request
        has ended for longest."""
        for lane, text in enumerate(self._texts):
            if text is not None and text.request is request:
                self._texts[lane] = None
        if not self._settings.lookup or not request.num_output_tokens:
            return
        start = max(0, request.prompt_len - self._settings.lookup_max)
        recent = self._recent.pop(request.namespace, None)
        if recent is None:
            recent = RecentTexts(self._settings.lookup_min, self._settings.lookup_max, _RECENT)
        self._recent[request.namespace] = recent
        recent.add(request.tokens.view(start))
        kept = sum(map(len, self._recent.values()))
        while len(self._recent) > 1 and (kept > 2 * _RECENT or len(self._recent) > _NAMESPACES):
            kept -= len(self._recent.pop(next(iter(self._recent))))

    def forget(self) -> None:
        self._recent.clear()
