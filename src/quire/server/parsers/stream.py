"""Base of tool-call parsers: they read text in pieces, and return it as text when it is no call.

A format is a generator that looks at `self.char`, the first character not yet consumed ("" at the
end), and yields to consume it. It never sees more than one character, so it does not matter how the
text was cut.
"""

from __future__ import annotations

import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from quire.grammar.lark import Rules

Reading = Generator[None, None, None]

SPACE = frozenset(" \t\r\n")
FENCE = "```"
_LANGUAGE = frozenset(string.ascii_letters + string.digits + "_-+")


class NotACallError(Exception):
    """The text read is not in the parser's format."""


@dataclass(slots=True)
class Text:
    text: str


@dataclass(slots=True)
class CallBegin:
    id: str
    name: str


@dataclass(slots=True)
class CallArguments:
    """More of the last call's arguments, as JSON text."""

    text: str


@dataclass(slots=True)
class CallEnd:
    """The last call is complete."""


Part = Text | CallBegin | CallArguments | CallEnd


class ToolParser(ABC):
    """Parses the calls in one completion.

    Text that turns out to be no call is passed on as text. Once a call's name is known the call has
    begun, and only text after the last character that fits is passed on. A call that the text's end
    cuts before that is dropped, with the mark that began it. The name must be one of `tools` (names
    to JSON Schemas of the parameters), so that clients get no other. Space around calls is dropped.
    Calls in a block of code are read as well, and the marks of the block are dropped.
    Subclasses say where calls begin and read them; `grammar` writes what the parser reads.

    Args:
        enforced: a grammar writes the calls, so `loose` marks and blocks of code begin none: what
            the grammar lets through as text is text.
    """

    name: ClassVar[str]
    starts: ClassVar[tuple[str, ...]] = ()
    """Marks that begin calls, anywhere. They are consumed already when `calls` runs."""
    first: ClassVar[str] = ""
    """Characters that begin calls as the first of a completion. They are not consumed when `calls`
    runs."""
    loose: ClassVar[tuple[str, ...]] = ()
    """Marks that begin calls of models which depart from the format, as `starts` do. One that is in
    `first` is not consumed."""
    fenced: ClassVar[str] = ""
    """Characters that begin calls as the first of a block of code, as `first` does."""
    marks: ClassVar[tuple[str, ...]] = ()
    """Further text of the format that may be special tokens."""
    by_property: ClassVar[bool] = False
    """Tells that arguments are written one by one; a schema's keywords about all of them are not
    enforced."""
    bare_strings: ClassVar[bool] = False
    """Tells that strings are written as they are; of a schema's keywords about one, only its values
    are enforced."""
    marks_text: ClassVar[bool] = False
    """Tells that other text than calls is marked too, so that it is parsed without tools, too."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], enforced: bool = False) -> None:
        self.tools = tools
        self.char = ""
        self.stopped = True
        """The model ended its text itself; false where a limit cut it."""
        self._begins = self.starts if enforced else (*self.starts, *self.loose)
        self._opens = self._begins if enforced or self.marks_text else (*self._begins, FENCE)
        self._in_code = False  # behind the mark of a block of code that is shown
        self._parts: list[Part] = []
        self._waiting = ""  # may begin a call, or be space around one
        self._held: list[str] = []  # consumed by `calls`, and nothing made of it yet
        self._reading: Reading | None = None
        self._arguments: list[str] | None = None  # while they are passed on as they come
        self._at_first = bool(self.first)
        self._behind_call = False
        self.marked = False
        """The call that is read began with a mark."""

    @abstractmethod
    def calls(self) -> Reading:
        """Reads one call or several.

        Raises:
            NotACallError: what was consumed since the last call began or ended is text.
        """

    @classmethod
    @abstractmethod
    def grammar(cls, rules: Rules, tools: Mapping[str, Mapping[str, Any]], parallel: bool) -> str:
        """Returns a Lark expression of one call, or with `parallel` of one or more."""

    # -- text in, parts out --------------------------------------------------------------------

    def feed(self, text: str) -> list[Part]:
        while text:
            text = self._scan(text) if self._reading is None else self._read(text)
        return self._take()

    def finish(self, *, stopped: bool = True) -> list[Part]:
        """Returns the rest; nothing may be fed afterwards. stopped: see the attribute."""
        self.stopped = stopped
        if self._reading is not None:
            self._step("")
        self._give(self._waiting)
        return self._take()

    def _take(self) -> list[Part]:
        if self._arguments:
            self._parts.append(CallArguments("".join(self._arguments)))
            self._arguments.clear()
        parts, self._parts = self._parts, []
        return parts

    def _give(self, text: str) -> None:
        if text:
            self._parts.append(Text(text))

    def _scan(self, text: str) -> str:
        """Passes text on up to where a call may begin; returns what is to be read as one."""
        text, self._waiting = self._waiting + text, ""
        if self._behind_call:
            text = text.lstrip()
            self._behind_call = not text
        if self._at_first:
            inner = text.lstrip()
            if not inner:
                self._waiting = text
                return ""
            self._at_first = False
            if inner[0] in self.first:
                self.marked = False
                return self._open(text[: len(text) - len(inner)], inner)
        place, start = min(
            ((at, start) for start in self._opens if (at := text.find(start)) >= 0),
            default=(len(text), ""),
        )
        if not start:
            self._pass(text)
            return ""
        end = place if start in self.first else place + len(start)
        if start == FENCE and self._in_code:
            self._in_code = False
            self._give(text[:end])
            return text[end:]
        plain = text[:place].rstrip()
        self._give(plain)
        self.marked = start not in (*self.first, FENCE)
        reading = self._block_of_code() if start == FENCE else None
        return self._open(text[len(plain) : end], text[end:], reading)

    def _block_of_code(self) -> Reading:
        """Reads a block of code that has calls, and nothing else."""
        self._in_code = True
        while self.char in _LANGUAGE:
            yield
        yield from self.space()
        while True:
            mark = ""
            while mark not in self._begins and (mark or self.char not in self.first + self.fenced):
                mark += self.char
                if not self.char or not any(start.startswith(mark) for start in self._begins):
                    raise NotACallError
                yield
            self.marked = bool(mark)
            yield from self.calls()
            yield from self.space()
            if not self.char:
                return
            if self.char == FENCE[0]:
                break
        yield from self.expect(FENCE)
        self._in_code = False

    def _pass(self, text: str) -> None:
        """Passes text without a call on, but for an end that may begin one, or space before it."""
        plain = text[: len(text) - overlap(text, self._opens)].rstrip()
        self._give(plain)
        self._waiting = text[len(plain) :]

    def _open(self, held: str, rest: str, reading: Reading | None = None) -> str:
        self._held = [held]
        self._reading = self.calls() if reading is None else reading
        return rest

    def _read(self, text: str) -> str:
        """Feeds characters to `calls`; returns what it leaves."""
        for place, char in enumerate(text):
            self._step(char)
            if self._reading is None:
                return text[place:]
        return ""

    def _step(self, char: str) -> None:
        self.char = char
        try:
            next(self._reading)  # type: ignore[arg-type]
        except (StopIteration, NotACallError) as end:
            self._reading = None
            if isinstance(end, NotACallError):
                self._parts = self._take()
                self._arguments = None
                if char or not self.marked:
                    self._pass(self.as_text("".join(self._held)))
            else:
                self._behind_call = True
            self._held = []
            return
        (self._held if self._arguments is None else self._arguments).append(self.char)

    # -- for `calls` ---------------------------------------------------------------------------

    @property
    def read_so_far(self) -> str:
        """Returns the text that was read since the last event, the mark that began it included."""
        return "".join(self._held)

    def as_text(self, read: str) -> str:
        """Returns what is shown of text that began as a call and is none."""
        return read

    def begin(self, name: str) -> None:
        """Begins a call. Raises NotACallError if there is no such tool."""
        if name not in self.tools:
            raise NotACallError
        self._held = []
        self._parts.append(CallBegin(self.new_id(), name))

    def end(self) -> None:
        self._held = []
        self._parts.append(CallEnd())

    def give_arguments(self, text: str) -> None:
        self._held = []
        self._parts.append(CallArguments(text))

    def passed_on(self, reading: Reading) -> Reading:
        """Passes on as arguments what `reading` consumes."""
        self._arguments = []
        yield from reading
        self._parts = self._take()
        self._arguments = None

    def captured(self, reading: Generator[None, None, Any]) -> Generator[None, None, str]:
        """Returns the text that `reading` consumes."""
        place = len(self._held)
        yield from reading
        return "".join(self._held[place:])

    def space(self, also: str = "") -> Reading:
        while self.char in SPACE or (self.char and self.char in also):
            yield

    def in_fence(self, reading: Callable[[], Reading]) -> Reading:
        """Reads what `reading` reads, in a block of code or without one."""
        fenced = self.char == FENCE[0]
        if fenced:
            yield from self.expect(FENCE)
            while self.char in _LANGUAGE:
                yield
            yield from self.space()
        yield from reading()
        yield from self.space()
        if fenced and self.char == FENCE[0]:
            yield from self.expect(FENCE)
            yield from self.space()

    def listed(self, entry: Callable[[], Reading]) -> Reading:
        """Reads what `entry` reads, once or several times with commas between."""
        while True:
            yield from self.space()
            yield from entry()
            yield from self.space()
            if self.char != ",":
                return
            yield

    def expect(self, text: str) -> Reading:
        for char in text:
            if self.char != char:
                raise NotACallError
            yield

    def one_of(self, *texts: str) -> Generator[None, None, str]:
        """Reads one of several texts, none of which begins another; returns it."""
        read = ""
        while read not in texts:
            read += self.char
            if not self.char or not any(text.startswith(read) for text in texts):
                raise NotACallError
            yield
        return read

    def new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"


def overlap(text: str, marks: Sequence[str]) -> int:
    """Returns the length of the longest end of `text` that begins one of `marks`, not all of it."""
    longest = max(map(len, marks), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(mark.startswith(end) and mark != end for mark in marks):
            return length
    return 0
