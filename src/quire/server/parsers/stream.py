"""Base class of the tool-call parsers, which read an answer piece by piece.

A format is a generator. It looks at `self.char`, the first character that is not consumed yet (""
at the end), and yields to consume it. It never looks further ahead, so the cuts between the pieces
do not matter.
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
    """The text does not have the parser's format."""


@dataclass(slots=True)
class Text:
    """Text that is not part of a call."""

    text: str


@dataclass(slots=True)
class CallBegin:
    """A call begins."""

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
    """Parses the tool calls in one completion.

    A call begins once its name is known; the name must be in `tools`. Until then the text may turn
    out not to be a call, and is emitted as text. After that only the text following the last valid
    character is emitted as text. If the completion ends in a call's mark or name, both are dropped.

    White space around calls is dropped. Calls in a block of code are parsed too, and the block's
    fences are dropped.

    Subclasses define where calls begin, read them (`calls`), and generate them (`grammar`).

    Args:
        tools: maps names of tools to the JSON Schemas of their parameters.
        enforced: a grammar writes the calls. Then only `starts` and `first_chars` begin calls, not
            `lenient_starts` or blocks of code.

    Attributes:
        char: the next character; "" at the end of the text.
    """

    name: ClassVar[str]
    starts: ClassVar[tuple[str, ...]] = ()
    """Marks that begin calls anywhere in the text. They are consumed before `calls` runs."""
    first_chars: ClassVar[str] = ""
    """Characters that begin a call at the start of a completion. `calls` consumes them itself."""
    lenient_starts: ClassVar[tuple[str, ...]] = ()
    """Further marks that begin calls when a model departs from its format. They are consumed as
    `starts` are, unless they are in `first_chars`."""
    fence_chars: ClassVar[str] = ""
    """Characters that, like `first_chars`, begin a call at the start of a block of code."""
    marks: ClassVar[tuple[str, ...]] = ()
    """Other marks of the format, which may be special tokens."""
    by_property: ClassVar[bool] = False
    """The format writes each argument by itself. Schema keywords about all arguments together are
    not enforced."""
    bare_strings: ClassVar[bool] = False
    """The format writes strings without quotes. For a string only `enum` and `const` are enforced,
    no other keyword of its schema."""
    text_marks: ClassVar[tuple[str, ...]] = ()
    """Marks around plain text. They are dropped."""
    answer: ClassVar[str] = ""
    """Text that begins every answer without calls."""
    marks_text: ClassVar[bool] = False
    """The format also marks plain text, so answers are parsed even without tools."""
    hints: ClassVar[tuple[str, ...]] = ()
    """Texts that show the format in a chat template that shows tools but not calls."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], enforced: bool = False) -> None:
        self.tools = tools
        self.char = ""
        self.stopped = True
        """The model ended its text itself; False if a limit cut it off."""
        self._call_starts = self.starts if enforced else (*self.starts, *self.lenient_starts)
        fences = () if enforced or self.marks_text else (FENCE,)
        self._scan_marks = (*self._call_starts, *self.text_marks, *fences)
        self._in_code = False  # inside a block of code that is emitted as text
        self._parts: list[Part] = []
        self._waiting = ""  # may begin a call, or be white space around one
        self._consumed: list[str] = []  # characters that `calls` read since the last part
        self._reading: Reading | None = None
        self._arguments: list[str] | None = None  # set while arguments are emitted as they arrive
        self._at_start = bool(self.first_chars)
        self._after_call = False
        self.began_with_mark = False
        """The current call began with a mark."""

    @classmethod
    def write(cls, calls: Sequence[tuple[str, dict[str, Any]]]) -> str | None:
        """Returns calls in the format, for a chat template that does not show them.

        Returns None if the format has no `hints`.

        Args:
            calls: names of tools with their arguments.
        """
        return None

    @abstractmethod
    def calls(self) -> Reading:
        """Reads one call or several.

        Raises:
            NotACallError: the characters consumed since the last part are text.
        """

    @classmethod
    @abstractmethod
    def grammar(cls, rules: Rules, tools: Mapping[str, Mapping[str, Any]], parallel: bool) -> str:
        """Returns a Lark rule for one call, or for one or more calls.

        Args:
            rules: the grammar's rules; helper rules are added to it.
            tools: maps names to the schemas of the parameters.
            parallel: allows more than one call.
        """

    # -- text in, parts out --------------------------------------------------------------------

    def feed(self, text: str) -> list[Part]:
        while text:
            text = self._scan(text) if self._reading is None else self._read(text)
        return self._take_parts()

    def finish(self, *, stopped: bool = True) -> list[Part]:
        """Returns the remaining parts. `feed` must not be called after it.

        Args:
            stopped: see the attribute.
        """
        self.stopped = stopped
        if self._reading is not None:
            self._step("")
        self._emit_text(self._waiting)
        return self._take_parts()

    def _take_parts(self) -> list[Part]:
        if self._arguments:
            self._parts.append(CallArguments("".join(self._arguments)))
            self._arguments.clear()
        parts, self._parts = self._parts, []
        return parts

    def _emit_text(self, text: str) -> None:
        if text:
            self._parts.append(Text(text))

    def _scan(self, text: str) -> str:
        """Emits the text before the next possible call; returns the text to read as a call."""
        text, self._waiting = self._waiting + text, ""
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        if self._at_start:
            inner = text.lstrip()
            if not inner:
                self._waiting = text
                return ""
            self._at_start = False
            if inner[0] in self.first_chars:
                self.began_with_mark = False
                return self._start_reading(text[: len(text) - len(inner)], inner)
        place, start = min(
            ((at, start) for start in self._scan_marks if (at := text.find(start)) >= 0),
            default=(len(text), ""),
        )
        if not start:
            self._pass_text(text)
            return ""
        end = place if start in self.first_chars else place + len(start)
        if start == FENCE and self._in_code:
            self._in_code = False
            self._emit_text(text[:end])
            return text[end:]
        plain = text[:place].rstrip()
        self._emit_text(plain)
        if start in self.text_marks:
            self._after_call = True
            return text[end:]
        self.began_with_mark = start not in (*self.first_chars, FENCE)
        reading = self._block_of_code() if start == FENCE else None
        return self._start_reading(text[len(plain) : end], text[end:], reading)

    def _block_of_code(self) -> Reading:
        """Reads a block of code that contains only calls."""
        self._in_code = True
        while self.char in _LANGUAGE:
            yield
        yield from self.space()
        while True:
            mark = ""
            while mark not in self._call_starts and (
                mark or self.char not in self.first_chars + self.fence_chars
            ):
                mark += self.char
                if not self.char or not any(start.startswith(mark) for start in self._call_starts):
                    raise NotACallError
                yield
            self.began_with_mark = bool(mark)
            yield from self.calls()
            yield from self.space()
            if not self.char:
                return
            if self.char == FENCE[0]:
                break
        yield from self.expect(FENCE)
        self._in_code = False

    def _pass_text(self, text: str) -> None:
        """Emits text without a call. An end that may begin one waits, with the space before it."""
        plain = text[: len(text) - overlap(text, self._scan_marks)].rstrip()
        self._emit_text(plain)
        self._waiting = text[len(plain) :]

    def _start_reading(self, held: str, rest: str, reading: Reading | None = None) -> str:
        self._consumed = [held]
        self._reading = self.calls() if reading is None else reading
        return rest

    def _read(self, text: str) -> str:
        """Feeds characters to `calls`; returns the rest when it ends."""
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
                self._parts = self._take_parts()
                self._arguments = None
                if char or not self.began_with_mark:
                    self._pass_text(self.as_text("".join(self._consumed)))
            else:
                self._after_call = True
            self._consumed = []
            return
        (self._consumed if self._arguments is None else self._arguments).append(self.char)

    # -- for `calls` ---------------------------------------------------------------------------

    @property
    def read_so_far(self) -> str:
        """The text that was read since the last part, including the mark that began the call."""
        return "".join(self._consumed)

    def as_text(self, read: str) -> str:
        """Returns the text to emit for `read`, which began like a call but is not one."""
        return read

    def begin_call(self, name: str) -> None:
        """Begins a call.

        Raises:
            NotACallError: there is no such tool.
        """
        if name not in self.tools:
            raise NotACallError
        self._consumed = []
        self._parts.append(CallBegin(self.new_id(), name))

    def end_call(self) -> None:
        self._consumed = []
        self._parts.append(CallEnd())

    def emit_arguments(self, text: str) -> None:
        self._consumed = []
        self._parts.append(CallArguments(text))

    def pass_arguments(self, reading: Reading) -> Reading:
        """Emits the text that `reading` consumes as arguments."""
        self._arguments = []
        yield from reading
        self._parts = self._take_parts()
        self._arguments = None

    def capture(self, reading: Generator[None, None, Any]) -> Generator[None, None, str]:
        """Runs `reading`, and returns the text that it consumes."""
        place = len(self._consumed)
        yield from reading
        return "".join(self._consumed[place:])

    def space(self, also: str = "") -> Reading:
        while self.char in SPACE or (self.char and self.char in also):
            yield

    def optional_fence(self, reading: Callable[[], Reading]) -> Reading:
        """Runs `reading`, inside a block of code or without one."""
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

    def comma_separated(self, entry: Callable[[], Reading]) -> Reading:
        """Runs `entry` once or more often, with commas in between."""
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
        """Reads one of `texts` and returns it. No text may be the beginning of another."""
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
    """Returns the length of the longest end of `text` that is an incomplete one of `marks`."""
    longest = max(map(len, marks), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(mark.startswith(end) and mark != end for mark in marks):
            return length
    return 0
