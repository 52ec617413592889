"""The grammar state of a request, and masks of many requests at once."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import (
    fill_next_token_bitmask,
    fill_next_token_bitmask_par,
    fill_next_token_bitmask_par_with_draft_tokens,
)

from quire.arrays import Int32
from quire.errors import GrammarError
from quire.features.structured_output.forced_text import ForcedTextFinder, write_forced
from quire.features.structured_output.string_walk import StringWalk
from quire.sampling_params import TokenRules

_MOST_THREADS = 16
_FIRST = 16
"""Words of a mask that are looked at first."""


@dataclass(slots=True, eq=False)
class GrammarState:
    """A request's progress in its grammar.

    Attributes:
        position: Number of tokens, with the prompt's, that the matcher consumed or has pending.
        matcher: None before the grammar is compiled, or without a grammar.
        forbidden: Pairs of end tokens and the length up to which they are forbidden. They are
            allowed if no other token is. The request ignores them until `min_tokens`, or for good.
        rules: Rules of the allowed tokens; None: no rules.
        last: Last generated tokens, as many as the rules look at.
        error: Why the grammar failed. The request must end.
        grammar: The matcher's original, shared with other requests.
        start: Position of the matcher's first token.
        pending: Tokens still to be consumed by the matcher.
        strings: Follows the document's strings; None: no use for it.
        forced: Finds text that the grammar forces; None: nobody needs it.
    """

    position: int
    matcher: LLMatcher | None = None
    forbidden: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    rules: TokenRules | None = None
    last: list[int] = field(default_factory=list)
    error: GrammarError | None = None
    grammar: LLMatcher | None = None
    start: int = 0
    pending: list[int] = field(default_factory=list)
    strings: StringWalk | None = None
    forced: ForcedTextFinder | None = None

    def begin(self, grammar: LLMatcher, strings: StringWalk | None = None) -> None:
        """Takes the compiled grammar."""
        self.start, self.grammar, self.strings = self.position, grammar, strings
        self.matcher = grammar.deep_copy()

    def again(self, text: Int32) -> LLMatcher | None:
        """Makes the matcher anew, and returns it. text: int32, all tokens that it may have
        consumed, behind the prompt."""
        if self.grammar is not None:
            self.matcher = self.grammar.deep_copy()
            self.matcher.consume_tokens(text[self.start : self.position].tolist())
        return self.matcher

    def advance(self, tokens: list[int]) -> None:
        """Takes the request's new tokens. The matcher has them before its next mask."""
        self.position += len(tokens)
        if self.rules is not None:
            # The mask allows all tokens after a draft that no token may follow.
            if not self.rules.hold(tokens, self.last):
                self.error = self.error or _no_token()
            if self.rules.reach:
                self.last = [*self.last, *tokens][-self.rules.reach :]
        # New ones come of a step whose masks were built, so nobody takes `pending` at this moment.
        if self.matcher is not None and tokens:
            self.pending += tokens


class MaskRow(NamedTuple):
    """A gated row's masks.

    Attributes:
        state: The request's state; None if the request is gone.
        lines: How many masks the row has: one for its next token and one after each draft.
        drafts: The draft tokens, at most `lines - 1`.
        text: int32, all tokens of the request; None: not known.
        line: The row's first line in the masks; -1: the one after the row before.
    """

    state: GrammarState | None
    lines: int = 1
    drafts: Sequence[int] = ()
    text: Int32 | None = None
    line: int = -1


_Known = tuple[MaskRow, GrammarState, int]
"""A row whose state is fine, and its line."""
_Plain = tuple[LLMatcher, int]
_Drafted = tuple[LLMatcher, int, list[int]]
_Opened = tuple[LLMatcher, StringWalk, LLMatcher, int]
"""A row in a string whose end is not known yet, a matcher at its end, and the row's line."""


def mask_threads() -> int:
    """Returns the number of threads that build masks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(_MOST_THREADS, (cores or 2) - 1))


_Unknown = tuple[GrammarState, int]
"""A row whose mask may be worth remembering, and its line."""


class MaskBuilder:
    """Builds masks on threads of llguidance's own, without the interpreter's lock."""

    def __init__(self, vocab_size: int) -> None:
        self._words = -(-vocab_size // 32)
        self._executor = LLExecutor(mask_threads())

    def build(
        self,
        rows: Sequence[MaskRow],
        masks: Int32,
        tokenizer_vocab: int,
        entered: Callable[[], None] = lambda: None,
    ) -> None:
        """Fills the rows' lines of masks, int32 [at least the lines of all rows, ceil(vocab / 32)].

        A mask allows everything in three cases: the row has no state, its state fails, or the mask
        follows a draft that the grammar refuses or that ends it. A failure sets the state's
        `error`.

        Args:
            rows: The rows of the step.
            masks: The array to fill.
            tokenizer_vocab: Tokens that the tokenizer knows.
            entered: Called when other threads may have the interpreter for a while.
        """
        self.consume(rows)
        wide = -(-tokenizer_vocab // 32)
        places = _first_lines(rows)
        room, own = masks, places
        if wide > self._words:
            own = _first_lines([row._replace(line=-1) for row in rows])
            room = np.empty((sum(row.lines for row in rows), wide), dtype=np.int32)
        known = self._fill(rows, own, room, tokenizer_vocab, entered)
        self._look_through(known, room, tokenizer_vocab)
        for row, state, line in known:
            if state.error is not None:
                room[line : line + row.lines] = -1
        if room is not masks:
            for row, line, place in zip(rows, own, places, strict=True):
                masks[place : place + row.lines] = room[line : line + row.lines, : self._words]

    def _fill(
        self,
        rows: Sequence[MaskRow],
        first_lines: Sequence[int],
        room: Int32,
        tokenizer_vocab: int,
        entered: Callable[[], None],
    ) -> list[_Known]:
        """Fills the rows' lines from tables, with forced tokens, and by llguidance.

        Returns the rows whose states are fine.
        """
        known, plain, drafted = list[_Known](), list[_Plain](), list[_Drafted]()
        opened, unknown = list[_Opened](), list[_Unknown]()
        for row, line in zip(rows, first_lines, strict=True):
            state, lines = row.state, row.lines
            matcher = None
            if state is not None and state.error is None:
                known.append((row, state, line))
                matcher = state.matcher
            if state is not None and matcher is not None:
                drafts = _tokens(row.drafts, tokenizer_vocab) if row.drafts else []
                if _forced(state, matcher, drafts, room[line : line + lines]):
                    continue
                if drafts:
                    drafted.append((matcher, line, drafts))
                elif not self._without_matcher(matcher, state, line, room, opened):
                    plain.append((matcher, line))
                    unknown.append((state, line))
            if matcher is None or lines > 1:
                # One call writes one mask: the others of a row, and those of no grammar, allow all.
                room[line + (matcher is not None) : line + lines] = -1
        plain += [(end, line) for _, _, end, line in opened]
        # Matchers of one copy of a grammar share a lock, and a thread takes neighbouring rows.
        copies = {line: id(state.grammar) for _, state, line in known}
        plain.sort(key=lambda entry: copies[entry[1]])
        entered()
        # llguidance refuses empty lists.
        if plain:
            fill_next_token_bitmask_par(self._executor, plain, room)
        if drafted:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, room)
        self._remember(unknown, room)
        self._open(opened, room)
        return known

    def _without_matcher(
        self,
        matcher: LLMatcher,
        state: GrammarState,
        line: int,
        room: Int32,
        opened: list[_Opened],
    ) -> bool:
        """Writes a mask that is remembered or put together from tables. Returns whether it has."""
        strings = state.strings
        if strings is None:
            return False
        if strings.short:
            self._in_string(matcher, strings, line, room, opened)
            return True
        if (mask := strings.remembered()) is not None:
            room[line] = mask
            return True
        return False

    @staticmethod
    def _remember(unknown: list[_Unknown], room: Int32) -> None:
        for state, line in unknown:
            strings, matcher = state.strings, state.matcher
            if strings is not None and strings.remembers and matcher and not matcher.is_error():
                strings.remember(room[line])

    @staticmethod
    def _in_string(
        matcher: LLMatcher, strings: StringWalk, line: int, room: Int32, opened: list[_Opened]
    ) -> None:
        """Writes a mask in a string that is bounded by its length alone, or notes the string as
        opened: its end has to be asked for."""
        if strings.base is not None:
            strings.tables.mask(strings.base, strings.left, room[line])
        else:
            end = strings.tables.at_end(matcher, strings.left)
            opened.append((matcher, strings, end or matcher, line))

    @staticmethod
    def _open(opened: list[_Opened], room: Int32) -> None:
        """Writes the first masks in strings, from those of their ends."""
        for matcher, strings, _, line in opened:
            strings.base = strings.tables.base(room[line], matcher, strings.left)
            if strings.base is None:
                fill_next_token_bitmask(matcher, room, line)
            else:
                strings.tables.mask(strings.base, strings.left, room[line])

    @staticmethod
    def consume(rows: Sequence[MaskRow]) -> None:
        """Lets the matchers consume what is pending. Costs some microseconds a token: less than
        waking other threads."""
        for row in rows:
            state = row.state
            if state is None or not state.pending or state.matcher is None or state.error:
                continue
            tokens, state.pending = state.pending, []
            if not state.matcher.consume_tokens(tokens):
                state.error = _failed(state.matcher)
            elif state.strings is not None:
                state.strings.take(tokens)

    @staticmethod
    def settle(rows: Sequence[MaskRow]) -> None:
        """Reads the rows' documents, which can wait until their masks are on their way."""
        for row in rows:
            if row.state is not None and row.state.strings is not None:
                row.state.strings.settle()

    def _look_through(self, rows: list[_Known], masks: Int32, tokenizer_vocab: int) -> None:
        """Notes which states have failed, and applies what else holds for a request."""
        for row, state, line in rows:
            if row.drafts and state.matcher is not None and state.matcher.is_error():
                self._fill_again(row, state, masks[line : line + row.lines], tokenizer_vocab)
        every = [line + i for row, _, line in rows for i in range(row.lines)]
        empty = _empty(masks, every)
        masks[empty] = -1
        ends: dict[tuple[int, ...], list[int]] = {}
        for row, state, line in rows:
            if state.matcher is not None and (line in empty or state.matcher.is_error()):
                state.error = _failed(state.matcher)
                continue
            for tokens, until in state.forbidden:
                if state.position < until:
                    lines = min(len(row.drafts) + 1, until - state.position)
                    ends.setdefault(tokens, []).extend(range(line, line + lines))
        for tokens, places in ends.items():
            self._forbid(tokens, places, masks)
        for row, state, line in rows:
            if state.rules is not None and state.error is None:
                self._restrict(row, state, state.rules, masks[line:])

    @staticmethod
    def _fill_again(row: MaskRow, state: GrammarState, masks: Int32, tokenizer_vocab: int) -> None:
        """Fills a row's masks up to the draft that has broken its matcher, whose work is limited:
        the request itself is not broken. masks: int32 [the row's lines, words]."""
        matcher = None if row.text is None else state.again(row.text)
        if matcher is None:
            return
        masks[:] = -1
        walker = matcher.deep_copy()
        fill_next_token_bitmask(walker, masks)
        if walker.is_error():
            state.error = _failed(walker)
        for line, token in enumerate(_tokens(row.drafts, tokenizer_vocab), 1):
            if walker.is_error() or not walker.try_consume_tokens([token]):
                break
            fill_next_token_bitmask(walker, masks, line)
            if walker.is_error():
                masks[line] = -1

    @staticmethod
    def _restrict(row: MaskRow, state: GrammarState, rules: TokenRules, masks: Int32) -> None:
        """Applies a row's rules to its masks. masks: int32 [at least the row's lines, words]."""
        words = rules.words
        for i in range(1 + len(row.drafts)):
            rules.apply(masks[i, :words], [*state.last, *row.drafts[:i]])
            if masks[i, :words].any():
                continue
            masks[i] = -1
            if i == 0:
                state.error = _no_token()

    @staticmethod
    def _forbid(tokens: tuple[int, ...], places: list[int], masks: Int32) -> None:
        """Removes tokens from the masks at `places`, unless no token would be left."""
        for place in _allow_some(masks, places, tokens):
            held = masks[place].copy()
            for token in tokens:
                masks[place, token >> 5] &= ~_bit(token)
            if not masks[place].any():
                masks[place] = held


def _forced(state: GrammarState, matcher: LLMatcher, drafts: Sequence[int], lines: Int32) -> bool:
    """Writes a row's masks if the grammar forces its next token. Rules may forbid that token."""
    finder, strings = state.forced, state.strings
    if finder is None or state.rules is not None or (strings is not None and strings.short):
        return False
    tokens = finder.find(matcher, state.position)
    return bool(tokens) and write_forced(tokens, drafts, lines)


def _bit(token: int) -> np.int32:
    return np.uint32(1 << (token & 31)).view(np.int32)


def _first_lines(rows: Sequence[MaskRow]) -> list[int]:
    """Returns the first line of each row."""
    found, line = [], 0
    for row in rows:
        line = row.line if row.line >= 0 else line
        found.append(line)
        line += row.lines
    return found


def _empty(masks: Int32, lines: Sequence[int]) -> list[int]:
    """Returns which of these lines allow nothing.

    Nearly all allow one of the first tokens, and no more is read of these: they lie in other cores'
    caches.
    """
    if not lines:
        return []
    doubtful = np.flatnonzero(~masks[lines, :_FIRST].any(axis=1))
    return [lines[i] for i in doubtful.tolist() if not masks[lines[i]].any()]


def _allow_some(masks: Int32, places: list[int], tokens: Sequence[int]) -> list[int]:
    """Returns the places whose masks allow one of the tokens: few do."""
    found = np.zeros(len(places), dtype=bool)
    for token in tokens:
        found |= (masks[places, token >> 5] & _bit(token)) != 0
    return [places[i] for i in np.flatnonzero(found)]


def _tokens(drafts: Sequence[int], tokenizer_vocab: int) -> list[int]:
    """Returns the drafts before the first that is no token of the tokenizer's: a model may have a
    larger vocabulary, and a matcher breaks at what it does not know."""
    return list(itertools.takewhile(lambda token: token < tokenizer_vocab, drafts))


def _no_token() -> GrammarError:
    return GrammarError("No token may come next.", code="no_token")


def _failed(matcher: LLMatcher) -> GrammarError:
    reason = matcher.get_error()[:300] or "no token can follow"
    return GrammarError(f"The grammar cannot be followed any further: {reason}")
