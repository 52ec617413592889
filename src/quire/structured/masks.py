"""One request's way through its grammar, and the masks of many at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par

from quire.arrays import Int32
from quire.errors import GrammarError

_MOST_THREADS = 16


@dataclass(slots=True, eq=False)
class Walk:
    """Where a request stands in its grammar.

    matcher: None until it is compiled. position: how many of the request's tokens, its prompt's
        included, it is past.
    forbidden: tokens that may not come before `until` tokens are there, unless nothing else may:
        ends that the user wants to see ignored, for a while (`min_tokens`) or for good.
    error: the grammar failed; the request must end.
    """

    position: int
    matcher: LLMatcher | None = None
    forbidden: tuple[int, ...] = ()
    until: int = 0
    error: GrammarError | None = None

    def advance(self, tokens: list[int]) -> None:
        """Takes in what the request has got since. Two microseconds a token: less than it takes to
        wake another thread."""
        self.position += len(tokens)
        matcher = self.matcher
        if tokens and matcher and self.error is None and not matcher.consume_tokens(tokens):
            self.error = _failed(matcher)


class MaskBuilder:
    """Builds masks on threads of llguidance's own, without the interpreter's lock."""

    def __init__(self, vocab_size: int) -> None:
        self._words = -(-vocab_size // 32)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self._executor = LLExecutor(max(1, min(_MOST_THREADS, (cores or 2) - 1)))

    def build(
        self,
        rows: Sequence[Walk | None],
        masks: Int32,
        tokenizer_vocab: int,
        entered: Callable[[], None] = lambda: None,
    ) -> None:
        """Fills masks, int32 [rows, ceil(vocab / 32)]. Those of no walk, and of walks that fail,
        which then say so, allow everything. entered: called when other threads may have the
        interpreter for a while."""
        wide = -(-tokenizer_vocab // 32)
        room = masks if wide <= self._words else np.empty((len(rows), wide), dtype=np.int32)
        walks = [(walk, i) for i, walk in enumerate(rows) if walk is not None and not walk.error]
        self._fill(walks, room, entered)
        if room is not masks:
            masks[:] = room[:, : self._words]
        for i, each in enumerate(rows):
            if each is None or each.error is not None:
                masks[i] = -1

    def _fill(
        self, walks: list[tuple[Walk, int]], masks: Int32, entered: Callable[[], None]
    ) -> None:
        fit = [(walk, walk.matcher, i) for walk, i in walks if walk.matcher is not None]
        pairs = [(matcher, i) for _, matcher, i in fit]
        entered()
        if not pairs:  # llguidance refuses empty lists
            return
        fill_next_token_bitmask_par(self._executor, pairs, masks)
        self._forbid([(walk, i) for walk, i in walks if walk.position < walk.until], masks)
        some = np.asarray(masks.any(axis=1))
        for walk, matcher, i in fit:
            if not some[i] or matcher.is_error():
                walk.error = _failed(matcher)

    @staticmethod
    def _forbid(walks: list[tuple[Walk, int]], masks: Int32) -> None:
        """Takes the walks' forbidden tokens out of their masks, unless nothing would be left."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for walk, i in walks:
            groups.setdefault(walk.forbidden, []).append(i)
        for tokens, places in groups.items():
            for place in _allow_some(masks, places, tokens):
                held = masks[place].copy()
                for token in tokens:
                    masks[place, token >> 5] &= ~_bit(token)
                if not masks[place].any():
                    masks[place] = held


def _bit(token: int) -> np.int32:
    return np.uint32(1 << (token & 31)).view(np.int32)


def _allow_some(masks: Int32, places: list[int], tokens: Sequence[int]) -> list[int]:
    """The places whose masks allow one of the tokens: few do."""
    found = np.zeros(len(places), dtype=bool)
    for token in tokens:
        found |= (masks[places, token >> 5] & _bit(token)) != 0
    return [places[i] for i in np.flatnonzero(found)]


def _failed(matcher: LLMatcher) -> GrammarError:
    reason = matcher.get_error()[:300] or "no token can follow"
    return GrammarError(f"The grammar cannot be followed any further: {reason}")
