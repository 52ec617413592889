"""Parses one choice's text into chat events."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from quire.outputs import Logprob
from quire.server.chat.custom_tools import InputReader
from quire.server.chat.dialogue import (
    ChatEvent,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolCallBegin,
    ToolCallDelta,
)
from quire.server.chat.text import ChoiceText
from quire.server.parsers.stream import CallArguments, CallBegin, CallEnd, Part, Text, ToolParser
from quire.server.parsers.think import ThinkParser

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

_MOST_CALLS = 8
"""Most marks of calls to examine in a block of reasoning that was never closed."""

Tokens = tuple[list[int], list[dict[int, Logprob]]]


def plain_events(piece: ChoiceText, with_tokens: bool) -> list[ChatEvent]:
    """Returns the events of a piece that needs no parsing.

    Args:
        with_tokens: tokens without text get an event too.
    """
    events: list[ChatEvent] = []
    text = piece.text
    if text or (with_tokens and piece.token_ids):
        events.append(TextDelta(piece.choice, text, piece.token_ids, piece.logprobs))
    if piece.finish_reason is not None:
        events.append(Finished(piece.choice, piece.finish_reason, piece.stop_reason))
    return events


class ChoiceParser:
    """Parses one choice: reasoning first, then text and tool calls.

    A token goes with the first event whose text came with the token or after it. If reasoning ends
    within a piece, the closing mark's token separates the reasoning's tokens from the answer's. If
    the mark is not a single token, the lengths of the tokens' bytes separate them.

    Args:
        think: splits off the reasoning; None for a model without reasoning.
        tools: finds tool calls; None if there are no tools.
        custom_tools: names of the tools whose arguments become an input.
        one_call: drops all calls after the first.
        show_reasoning: reasoning gets events.
        with_tokens: tokens without text get an event too.

    Attributes:
        reasoning_tokens: number of tokens in the reasoning block, including its marks.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        think: ThinkParser | None,
        tools: ToolParser | None,
        *,
        custom_tools: frozenset[str],
        one_call: bool,
        show_reasoning: bool,
        with_tokens: bool,
    ) -> None:
        self.reasoning_tokens = 0
        self._tokenizer = tokenizer
        self._think = think
        self._tools = tools
        self._custom_tools = custom_tools
        self._input: InputReader | None = None
        self._one_call = one_call
        self._show_reasoning = show_reasoning
        self._with_tokens = with_tokens
        self._close = None if think is None else tokenizer.added_tokens.get(think.close)
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._calls = 0
        self._complete_calls = 0

    def read(self, piece: ChoiceText) -> list[ChatEvent]:
        events: list[ChatEvent] = []
        text, last = piece.text, piece.finish_reason is not None
        waiting = len(self._token_ids)
        self._token_ids += piece.token_ids
        self._logprobs += piece.logprobs
        if self._think is not None:
            text = self._read_reasoning(self._think, piece, waiting, events)
        if self._tools is not None:
            parts = self._tools.feed(text)
            if last:
                parts += self._tools.finish(stopped=piece.finish_reason == "stop")
            for part in parts:
                self._add_part(piece.choice, part, events)
        elif text:
            events.append(TextDelta(piece.choice, text, *self._take_tokens()))
        if piece.finish_reason is not None:
            if self._with_tokens and self._token_ids:
                events.append(TextDelta(piece.choice, "", *self._take_tokens()))
            called = self._complete_calls and piece.finish_reason == "stop"
            reason = "tool_calls" if called else piece.finish_reason
            events.append(Finished(piece.choice, reason, piece.stop_reason))
        return events

    def _take_tokens(self, count: int | None = None) -> Tokens:
        """Removes and returns the first `count` waiting tokens, or all of them."""
        spent = self._token_ids[:count], self._logprobs[:count]
        self._token_ids = [] if count is None else self._token_ids[count:]
        self._logprobs = [] if count is None else self._logprobs[count:]
        return spent

    def _read_reasoning(
        self, think: ThinkParser, piece: ChoiceText, waiting: int, events: list[ChatEvent]
    ) -> str:
        """Appends the reasoning's event to `events`, and returns the text of the answer.

        Args:
            waiting: number of waiting tokens from earlier pieces.
        """
        if think.done:
            return piece.text
        reasoning, answer, block = think.feed(piece.text)
        undecided = think.undecided
        if piece.finish_reason is not None:
            rest = think.finish()
            inside = not undecided and not think.in_answer
            if inside and self._tools is not None and piece.finish_reason == "stop":
                rest = _before_calls(self._tools, rest[0])
            reasoning, answer = reasoning + rest[0], answer + rest[1]
        elif undecided:
            return ""
        count = 0
        if block:
            whole = block == len(piece.text)
            count = waiting + (len(piece.token_ids) if whole else self._tokens_in(piece, block))
        elif not think.in_answer and not undecided:
            count = len(self._token_ids)
        self.reasoning_tokens += count
        tokens = self._take_tokens(count) if count else ([], [])
        if self._show_reasoning and (reasoning or (self._with_tokens and count)):
            events.append(ReasoningDelta(piece.choice, reasoning, *tokens))
        return answer

    def _tokens_in(self, piece: ChoiceText, characters: int) -> int:
        """Returns how many of the piece's tokens make up its first characters.

        Args:
            characters: number of characters, which end with the block's closing mark.
        """
        if self._close in piece.token_ids:
            return piece.token_ids.index(self._close) + 1
        left = len(piece.text[:characters].encode())
        for count, token in enumerate(piece.token_ids):
            if left <= 0:
                return count
            left -= len(self._tokenizer.token_bytes(token))
        return len(piece.token_ids)

    def _add_part(self, choice: int, part: Part, events: list[ChatEvent]) -> None:
        if isinstance(part, CallBegin):
            self._calls += 1
        shown = self._calls == 1 or not self._one_call
        index = self._calls - 1
        match part:
            case Text(text):
                events.append(TextDelta(choice, text, *self._take_tokens()))
            case CallBegin(id, name) if shown:
                custom = name in self._custom_tools
                self._input = InputReader() if custom else None
                events.append(ToolCallBegin(choice, index, id, name, *self._take_tokens(), custom))
            case CallArguments(text) if shown and self._input is not None:
                if read := self._input.feed(text):
                    delta = ToolCallDelta(choice, index, read, *self._take_tokens(), True)
                    events.append(delta)
            case CallArguments(text) if shown:
                events.append(ToolCallDelta(choice, index, text, *self._take_tokens()))
            case CallEnd():
                self._complete_calls += 1
                if self._input is not None and (rest := self._input.finish()):
                    delta = ToolCallDelta(choice, index, rest, *self._take_tokens(), True)
                    events.append(delta)
                self._input = None


def _before_calls(tools: ToolParser, text: str) -> tuple[str, str]:
    """Splits the rest of an unclosed block of reasoning into (reasoning, calls at its end)."""
    marks = "|".join(map(re.escape, tools.starts))
    places = [found.start() for found in re.finditer(marks, text)] if marks else []
    end = len(text)
    for place in reversed(places[-_MOST_CALLS:]):
        reader = type(tools)(tools.tools)
        parts = reader.feed(text[place:]) + reader.finish()
        whole = any(isinstance(part, CallEnd) for part in parts)
        if whole and not any(isinstance(part, Text) and part.text.strip() for part in parts):
            end = place
    return text[:end].rstrip(), text[end:]
