"""The grammar state of a request, and its masks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import (
    fill_next_token_bitmask,
    fill_next_token_bitmask_par_with_draft_tokens,
)

from quire.arrays import Int32
from quire.errors import GrammarError
from quire.features.structured_output.forced_text import ForcedTextFinder, write_forced
from quire.features.structured_output.string_walk import StringWalk
from quire.sampling_params import TokenRules

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
        pending: Tokens still to be consumed by the matcher.
        unread: Tokens still to be taken by `strings`.
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
    pending: list[int] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)
    strings: StringWalk | None = None
    forced: ForcedTextFinder | None = None

    def begin(self, grammar: LLMatcher, strings: StringWalk | None = None) -> None:
        """Takes the compiled grammar."""
        self.grammar, self.strings = grammar, strings
        self.matcher = grammar.deep_copy()

    def restart(self, position: int) -> None:
        """Forgets all tokens from a position on, where the grammar begins."""
        self.position, self.last, self.pending, self.unread = position, [], [], []
        self.matcher = self.strings = None
        if self.forced is not None:
            self.forced = ForcedTextFinder()

    def again(self, text: Sequence[int]) -> LLMatcher | None:
        """Makes the matcher anew, and returns it.

        Args:
            text: All tokens since the grammar's start.
        """
        if self.grammar is not None:
            self.matcher = self.grammar.deep_copy()
            self.matcher.consume_tokens(list(text))
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
        if self.matcher is not None and tokens:
            self.pending += tokens
            if self.strings is not None:
                self.unread += tokens

    def settle(self) -> None:
        """Lets the matcher and `strings` have all tokens, which can wait until a mask is built."""
        MaskBuilder.consume(self)
        if self.strings is not None:
            self.strings.settle()


class MaskRow(NamedTuple):
    """A gated row's masks.

    Attributes:
        state: The request's state; None if the request is gone.
        lines: How many masks the row has: one for its next token and one after each draft.
        drafts: The draft tokens, at most `lines - 1`.
        text: All tokens since the grammar's start; None: not known.
    """

    state: GrammarState | None
    lines: int = 1
    drafts: Sequence[int] = ()
    text: Sequence[int] | None = None


class MaskBuilder:
    """Builds masks on the calling thread."""

    def __init__(self, vocab_size: int) -> None:
        self._words = -(-vocab_size // 32)
        self._executor: LLExecutor | None = None

    def build(self, rows: Sequence[MaskRow], masks: Int32, tokenizer_vocab: int) -> None:
        """Fills the rows' lines of masks, int32 [at least the lines of all rows, ceil(vocab / 32)].

        A mask allows everything in three cases: the row has no state, its state fails, or the mask
        follows a draft that the grammar refuses or that ends it. A failure sets the state's
        `error`.

        Args:
            rows: The rows, one behind the other.
            masks: The array to fill.
            tokenizer_vocab: Tokens that the tokenizer knows.
        """
        wide, line = -(-tokenizer_vocab // 32), 0
        for row in rows:
            lines = masks[line : line + row.lines]
            line += row.lines
            if wide > self._words:
                room = np.empty((row.lines, wide), dtype=np.int32)
                self._build(row, room, tokenizer_vocab)
                lines[:] = room[:, : self._words]
            else:
                self._build(row, lines, tokenizer_vocab)

    def _build(self, row: MaskRow, lines: Int32, tokenizer_vocab: int) -> None:
        """Fills a row's lines, int32 [the row's lines, words]."""
        state = row.state
        if state is None or state.error is not None:
            lines[:] = -1
            return
        if not _recalled(row, state, lines):
            self.consume(state)
            if state.error is None:
                self._fill(row, state, lines, tokenizer_vocab)
        self._look_through(row, state, lines, tokenizer_vocab)
        if state.error is not None:
            lines[:] = -1

    def _fill(self, row: MaskRow, state: GrammarState, lines: Int32, tokenizer_vocab: int) -> None:
        """Fills a row's lines from tables, with forced tokens, or by llguidance."""
        matcher = state.matcher
        if matcher is None:
            lines[:] = -1
            return
        drafts = _tokens(row.drafts, tokenizer_vocab) if row.drafts else []
        if _forced(state, matcher, drafts, lines):
            return
        # The masks behind a draft that is refused allow all.
        lines[1:] = -1
        if drafts:
            if self._executor is None:
                self._executor = LLExecutor(1)
            fill_next_token_bitmask_par_with_draft_tokens(
                self._executor, [(matcher, 0, drafts)], lines
            )
        elif state.strings is None:
            fill_next_token_bitmask(matcher, lines)
        elif state.forced is None or not state.strings.recall(lines[0]):
            _fill_at_place(matcher, state.strings, lines)

    @staticmethod
    def consume(state: GrammarState) -> None:
        """Lets the matcher consume what is pending. Costs some microseconds a token."""
        if not state.pending or state.matcher is None or state.error:
            return
        tokens, state.pending = state.pending, []
        if not state.matcher.consume_tokens(tokens):
            state.error = _failed(state.matcher)
        _read(state)

    def _look_through(
        self, row: MaskRow, state: GrammarState, lines: Int32, tokenizer_vocab: int
    ) -> None:
        """Notes whether the state has failed, and applies what else holds for the request."""
        matcher = state.matcher
        if row.drafts and matcher is not None and matcher.is_error():
            self._fill_again(row, state, lines, tokenizer_vocab)
            matcher = state.matcher
        empty = [i for i, line in enumerate(lines) if _is_empty(line)]
        for i in empty:
            lines[i] = -1
        if matcher is not None and (0 in empty or matcher.is_error()):
            state.error = _failed(matcher)
            return
        for tokens, until in state.forbidden:
            if state.position < until:
                for line in lines[: min(len(row.drafts) + 1, until - state.position)]:
                    _forbid(tokens, line)
        if state.rules is not None and state.error is None:
            self._restrict(row, state, state.rules, lines)

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


def _read(state: GrammarState) -> None:
    """Lets `strings` take the request's new tokens."""
    if state.strings is not None and state.unread:
        tokens, state.unread = state.unread, []
        state.strings.take(tokens)


def _recalled(row: MaskRow, state: GrammarState, lines: Int32) -> bool:
    """Writes a row's mask without its matcher, if the place in the document is known."""
    if state.strings is None or row.drafts or state.forced is not None:
        return False
    _read(state)
    if not state.strings.recall(lines[0]):
        return False
    lines[1:] = -1
    return True


def _fill_at_place(matcher: LLMatcher, strings: StringWalk, lines: Int32) -> None:
    """Writes the mask of a place in a document that is not known: it is put together from tables,
    or llguidance's."""
    if strings.short:
        _fill_in_string(matcher, strings, lines)
        return
    fill_next_token_bitmask(matcher, lines)
    if not matcher.is_error():
        strings.remember(lines[0], forced=bool(matcher.compute_ff_bytes()))


def _fill_in_string(matcher: LLMatcher, strings: StringWalk, lines: Int32) -> None:
    """Writes a mask in a string whose masks differ only in the characters left. The first one there
    is llguidance's, or is made from that of the string's end."""
    tables = strings.tables
    if strings.patterned:
        fill_next_token_bitmask(matcher, lines)
        if not matcher.is_error():
            strings.begin_string(lines[0, : tables.words].copy())
        return
    if strings.base is None:
        fill_next_token_bitmask(tables.at_end(matcher, strings.left) or matcher, lines)
        strings.begin_string(tables.base(lines[0], matcher, strings.left))
    if strings.base is None:
        fill_next_token_bitmask(matcher, lines)
    else:
        tables.mask(strings.base, strings.left, lines[0])


def _forbid(tokens: tuple[int, ...], line: Int32) -> None:
    """Removes tokens from a mask, unless no token would be left."""
    allowed = [token for token in tokens if line[token >> 5] >> (token & 31) & 1]
    if not allowed:
        return
    held = line.copy()
    for token in allowed:
        line[token >> 5] &= ~_bit(token)
    if _is_empty(line):
        line[:] = held


def _forced(state: GrammarState, matcher: LLMatcher, drafts: Sequence[int], lines: Int32) -> bool:
    """Writes a row's masks if the grammar forces its next token. Rules may forbid that token."""
    finder, strings = state.forced, state.strings
    if finder is None or state.rules is not None or (strings is not None and strings.short):
        return False
    tokens = finder.find(matcher, state.position)
    return bool(tokens) and write_forced(tokens, drafts, lines)


def _bit(token: int) -> np.int32:
    return np.uint32(1 << (token & 31)).view(np.int32)


def _is_empty(line: Int32) -> bool:
    """Whether a mask allows nothing. Nearly all allow one of the first tokens."""
    return not line[:_FIRST].any() and not line.any()


def _tokens(drafts: Sequence[int], tokenizer_vocab: int) -> list[int]:
    """Returns the drafts before the first that is no token of the tokenizer's: a model may have a
    larger vocabulary, and a matcher breaks at what it does not know."""
    return list(itertools.takewhile(lambda token: token < tokenizer_vocab, drafts))


def _no_token() -> GrammarError:
    return GrammarError("No token may come next.", code="no_token")


def _failed(matcher: LLMatcher) -> GrammarError:
    reason = matcher.get_error()[:300] or "no token can follow"
    return GrammarError(f"The grammar cannot be followed any further: {reason}")
