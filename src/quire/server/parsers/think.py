"""Splits off a block of reasoning before the answer: <think>...</think> and similar marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from quire.server.parsers.stream import overlap


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A format of reasoning blocks.

    Attributes:
        name: the format's name in `--reasoning-parser`.
        open: mark before the block.
        close: mark after the block.
        implicit_open: a completion begins with reasoning even without the opening mark.
        turn: text after every block.
        answer: text that begins an answer, with or without reasoning before it.
        hint: text in a chat template that uses the format; "" means `close`.
    """

    name: str
    open: str
    close: str
    implicit_open: bool = False
    turn: str = ""
    answer: str = ""
    hint: str = ""

    @property
    def closing(self) -> str:
        """The text that closes an open block and begins the answer."""
        return f"\n{self.close}{self.turn}{self.answer}" if self.answer else f"\n{self.close}\n\n"

    def begins_open(self, prompt: str, continued: str | None = None) -> bool | None:
        """Tells whether the completion of a prompt begins inside a reasoning block.

        Args:
            prompt: the prompt's text.
            continued: the text of the message that the completion continues; None for a new one.

        Returns:
            True if it begins inside a block, False if it begins with the answer, None if the
            model may open a block.
        """
        if continued is not None:
            return continued.rfind(self.open) > continued.rfind(self.close)
        end = prompt.rstrip()
        if end.endswith(self.open):
            return True
        if end.endswith(self.answer or self.close):
            return False
        return True if self.implicit_open else None


class _ThinkState(Enum):
    START = 0
    INSIDE = 1
    AFTER = 2
    ANSWER = 3


class ThinkParser:
    """Splits one completion into reasoning and answer.

    Only a block at the start of the completion counts. White space around the reasoning is dropped.

    Args:
        begins_open: see `ReasoningFormat.begins_open`.
        calls: marks that begin calls. Text of an open block is held back from the first such mark
            on, because models may call tools without closing the block.
    """

    def __init__(
        self, format: ReasoningFormat, begins_open: bool | None, calls: Sequence[str] = ()
    ) -> None:
        self._format = format
        self._calls = tuple(calls)
        self.close = format.close
        self._waiting = ""
        self._silent = True  # no reasoning was returned yet
        # Models may repeat the opening mark at the end of the prompt.
        self._may_repeat = begins_open is True
        self._state = {
            True: _ThinkState.INSIDE,
            False: _ThinkState.ANSWER,
            None: _ThinkState.START,
        }[begins_open]

    @property
    def undecided(self) -> bool:
        """Tells whether the text so far may still become either reasoning or answer."""
        return self._state is _ThinkState.START

    @property
    def in_answer(self) -> bool:
        return self._state in (_ThinkState.AFTER, _ThinkState.ANSWER)

    @property
    def done(self) -> bool:
        """Tells whether all further text belongs to the answer as it is."""
        return self._state is _ThinkState.ANSWER

    def feed(self, text: str) -> tuple[str, str, int]:
        """Splits more text.

        Returns:
            More reasoning, more of the answer, and the number of characters of `text` that belong
            to the reasoning block.
        """
        if self._state is _ThinkState.ANSWER:
            return "", text, 0
        waited = len(self._waiting)
        buffer, self._waiting = self._waiting + text, ""
        total, reasoning = len(buffer), ""
        if self._state is _ThinkState.START:
            buffer = self._start(buffer)
        if self._state is _ThinkState.INSIDE:
            reasoning, buffer = self._inside(buffer)
        block = max(0, total - len(buffer) - waited) if self.in_answer else len(text)
        if self._state is _ThinkState.AFTER:
            buffer = buffer.lstrip()
            if buffer:
                self._state = _ThinkState.ANSWER
        return (reasoning, buffer, block) if self.in_answer else (reasoning, "", block)

    def finish(self) -> tuple[str, str]:
        """Returns the text that was held back, as (reasoning, answer)."""
        text, self._waiting = self._waiting, ""
        if self._state is _ThinkState.INSIDE:
            return text.rstrip(), ""
        return "", text

    def _start(self, buffer: str) -> str:
        inner = buffer.lstrip()
        if inner.startswith(self._format.open):
            self._state = _ThinkState.INSIDE
            return inner[len(self._format.open) :]
        if self._format.open.startswith(inner):
            self._waiting = buffer
            return ""
        self._state = _ThinkState.ANSWER
        return buffer

    def _inside(self, buffer: str) -> tuple[str, str]:
        """Splits text that begins inside the block into (reasoning, text after the block)."""
        if self._silent:
            buffer = buffer.lstrip()
        if self._may_repeat:
            if self._format.open.startswith(buffer) and buffer != self._format.open:
                self._waiting = buffer
                return "", ""
            self._may_repeat = False
            buffer = buffer.removeprefix(self._format.open).lstrip()
        at = buffer.find(self._format.close)
        if at >= 0:
            self._state = _ThinkState.AFTER
            return buffer[:at].rstrip(), buffer[at + len(self._format.close) :]
        begun = [at for mark in self._calls if (at := buffer.find(mark)) >= 0]
        waits = len(buffer) - overlap(buffer, (self._format.close, *self._calls))
        reasoning = buffer[: min(begun, default=waits)].rstrip()
        self._waiting = buffer[len(reasoning) :]
        self._silent = self._silent and not reasoning
        return reasoning, ""
