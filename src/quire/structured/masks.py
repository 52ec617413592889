"""One request's way through its grammar, and the masks of many at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par

from quire.errors import GrammarError
from quire.plan import Int32

_MOST_THREADS = 16


@dataclass(slots=True, eq=False)
class Walk:
    """Where a request stands in its grammar. The engine's thread owns `sent`, the one that builds
    masks the rest.

    matcher: None until it is compiled. sent: how many of the request's tokens, its prompt's
        included, the engine has handed over. position: how many the matcher is past.
    forbidden: tokens that may not come before `until` tokens are there, unless nothing else may:
        ends that the user wants to see ignored, for a while (`min_tokens`) or for good.
    error: the grammar failed; the request must end.
    """

    position: int
    sent: int
    matcher: LLMatcher | None = None
    forbidden: tuple[int, ...] = ()
    until: int = 0
    error: GrammarError | None = None


@dataclass(slots=True)
class Row:
    """A mask to be built: for which walk, after which tokens it has not seen yet. walk None: the
    row's request is gone, so any token will do."""

    walk: Walk | None
    tokens: list[int] = field(default_factory=list)


class MaskBuilder:
    """Builds masks on threads of llguidance's own, without the interpreter's lock."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self._executor = LLExecutor(max(1, min(_MOST_THREADS, (cores or 2) - 1)))

    def build(self, rows: list[Row], tokenizer_vocab: int) -> Int32:
        """The rows' masks, int32 [rows, ceil(vocab / 32)]; those of walks that fail, which then say
        so, allow everything. Raises nothing: a grammar must not end the engine."""
        words = -(-self._vocab_size // 32)
        wide = max(words, -(-tokenizer_vocab // 32))
        masks: Int32 = np.full((len(rows), wide), -1, dtype=np.int32)
        try:
            self._fill(rows, masks)
        except Exception as error:
            masks[:] = -1
            for row in rows:
                if row.walk is not None:
                    row.walk.error = GrammarError(f"The grammar failed ({type(error).__name__}).")
        return masks if wide == words else np.ascontiguousarray(masks[:, :words])

    def _fill(self, rows: list[Row], masks: Int32) -> None:
        walks = [(row.walk, row.tokens, i) for i, row in enumerate(rows) if row.walk is not None]
        for walk, tokens, _ in walks:
            self._advance(walk, tokens)
        fit = [
            (walk, walk.matcher, i)
            for walk, _, i in walks
            if walk.matcher is not None and walk.error is None
        ]
        if fit:  # llguidance refuses empty lists
            fill_next_token_bitmask_par(self._executor, [(m, i) for _, m, i in fit], masks)
        self._forbid([(walk, i) for walk, _, i in fit if walk.position < walk.until], masks)
        some = np.asarray(masks.any(axis=1))
        for walk, matcher, i in fit:
            if not some[i] or matcher.is_error():
                walk.error = _failed(matcher)
        for walk, _, i in walks:
            if walk.error is not None:
                masks[i] = -1

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

    @staticmethod
    def _advance(walk: Walk, tokens: list[int]) -> None:
        """Takes in what the request has got since. Some microseconds: less than it takes to wake
        another thread."""
        walk.position += len(tokens)
        matcher = walk.matcher
        if tokens and matcher and walk.error is None and not matcher.consume_tokens(tokens):
            walk.error = _failed(matcher)


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
