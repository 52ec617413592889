"""Reasoning in a block of its own before the answer: <think>...</think> and its kin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from quire.server.parsers.stream import overlap


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A format of reasoning blocks.

    Attributes:
        implied: a completion begins with reasoning even where nothing opens the block.
        turn: text that follows every block.
        answer: text that begins an answer, behind reasoning or without.
        hint: text of chat templates that use the format; its end mark where empty.
    """

    name: str
    open: str
    close: str
    implied: bool = False
    turn: str = ""
    answer: str = ""
    hint: str = ""

    @property
    def closing(self) -> str:
        """Text that closes an open block and begins the answer."""
        return f"\n{self.close}{self.turn}{self.answer}" if self.answer else f"\n{self.close}\n\n"

    def begins_open(self, prompt: str, continued: str | None = None) -> bool | None:
        """Tells from a prompt whether its completion begins inside a reasoning block.

        True: it does. False: the block has been closed. None: the model may open one.

        Args:
            continued: the text of the message that the completion continues, if it does.
        """
        if continued is not None:
            return continued.rfind(self.open) > continued.rfind(self.close)
        end = prompt.rstrip()
        if end.endswith(self.open):
            return True
        if end.endswith(self.answer or self.close):
            return False
        return True if self.implied else None


class _ThinkState(Enum):
    START = 0
    INSIDE = 1
    BEHIND = 2
    ANSWER = 3


class ThinkParser:
    """Splits one completion into reasoning and answer.

    Space around the reasoning is dropped. Only a block that the completion begins with counts.

    Args:
        calls: marks that begin calls. From the first one on the text of an open block waits, as
            models may call without closing it.
    """

    def __init__(
        self, format: ReasoningFormat, begins_open: bool | None, calls: Sequence[str] = ()
    ) -> None:
        self._format = format
        self._calls = tuple(calls)
        self.close = format.close
        self._waiting = ""
        self._silent = True  # nothing of the reasoning was passed on yet
        self._may_repeat = begins_open is True  # models repeat a mark that the prompt ends with
        self._place = {
            True: _ThinkState.INSIDE,
            False: _ThinkState.ANSWER,
            None: _ThinkState.START,
        }[begins_open]

    @property
    def undecided(self) -> bool:
        """Tells whether the text so far may become either reasoning or answer."""
        return self._place is _ThinkState.START

    @property
    def answering(self) -> bool:
        return self._place in (_ThinkState.BEHIND, _ThinkState.ANSWER)

    def feed(self, text: str) -> tuple[str, str, int]:
        """Returns (more reasoning, more of the answer, how many of the new characters were the
        block's)."""
        if self._place is _ThinkState.ANSWER:
            return "", text, 0
        waited = len(self._waiting)
        buffer, self._waiting = self._waiting + text, ""
        total, reasoning = len(buffer), ""
        if self._place is _ThinkState.START:
            buffer = self._start(buffer)
        if self._place is _ThinkState.INSIDE:
            reasoning, buffer = self._inside(buffer)
        block = max(0, total - len(buffer) - waited) if self.answering else len(text)
        if self._place is _ThinkState.BEHIND:
            buffer = buffer.lstrip()
            if buffer:
                self._place = _ThinkState.ANSWER
        return (reasoning, buffer, block) if self.answering else (reasoning, "", block)

    def finish(self) -> tuple[str, str]:
        """Returns the text that was undecided, as (reasoning, answer)."""
        text, self._waiting = self._waiting, ""
        if self._place is _ThinkState.INSIDE:
            return text.rstrip(), ""
        return "", text

    def _start(self, buffer: str) -> str:
        inner = buffer.lstrip()
        if inner.startswith(self._format.open):
            self._place = _ThinkState.INSIDE
            return inner[len(self._format.open) :]
        if self._format.open.startswith(inner):
            self._waiting = buffer
            return ""
        self._place = _ThinkState.ANSWER
        return buffer

    def _inside(self, buffer: str) -> tuple[str, str]:
        """Splits text inside the block into (reasoning, text behind the block)."""
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
            self._place = _ThinkState.BEHIND
            return buffer[:at].rstrip(), buffer[at + len(self._format.close) :]
        begun = [at for mark in self._calls if (at := buffer.find(mark)) >= 0]
        waits = len(buffer) - overlap(buffer, (self._format.close, *self._calls))
        reasoning = buffer[: min(begun, default=waits)].rstrip()
        self._waiting = buffer[len(reasoning) :]
        self._silent = self._silent and not reasoning
        return reasoning, ""
