"""Parses JSON character by character, and calls that are JSON objects."""

from __future__ import annotations

import json
import re
from collections.abc import Generator

from quire.server.parsers.stream import NotACallError, Reading, ToolParser

_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")
_NUMBER_CHARS = frozenset("+-.0123456789eE")
_HEX = frozenset("0123456789abcdefABCDEF")
_WORDS = {"t": "true", "f": "false", "n": "null"}
_MAX_DEPTH = 100

_ARGUMENTS = ("arguments", "parameters")
_NAME = ("name", "function", "tool_name")


class JsonToolParser(ToolParser):
    """Parses formats with calls like {"name": "f", "arguments": {...}}, with keys in any order.

    Attributes:
        needs_arguments: an object without arguments is text. Formats without marks set it, because
            an answer in JSON may also have a key such as "name".
    """

    needs_arguments = False

    def call(self) -> Reading:
        """Reads one call's object. The closing brace may be missing after complete arguments."""
        if not (yield from self._call()):
            raise NotACallError

    def _call(self) -> Generator[None, None, bool]:
        """Reads an object; returns whether it is a call."""
        name: str | None = None
        arguments: str | None = None
        done = inner = False
        yield from self.expect("{")
        while True:
            yield from self.space()
            key = yield from self.string()
            yield from self.space()
            yield from self.expect(":")
            yield from self.space()
            if key in _ARGUMENTS and not done:
                if name is not None and self.char == "{":
                    self.begin_call(name)
                    yield from self.pass_arguments(self.value())
                    done = True
                else:
                    arguments = _object_text((yield from self.capture(self.value())))
            elif key in _NAME and self.char == '"' and name is None:
                name = yield from self.string()
                if name not in self.tools:
                    raise NotACallError
            elif key == "function" and self.char == "{" and not done:
                done = inner = yield from self._call()
            else:
                yield from self.value()
            if not done and name is not None and arguments is not None:
                self.begin_call(name)
                self.emit_arguments(arguments)
                done = True
            yield from self.space()
            if self.char != ",":
                break
            yield
        if not done:
            if self.char != "}" or name is None or self.needs_arguments:
                return False
            self.begin_call(name)
            self.emit_arguments("{}")
            done = True
        if self.char == "}":
            yield
        if not inner:
            self.end_call()
        return done

    def one_or_list(self) -> Reading:
        """Reads one call's object, or a list of them."""
        if self.char != "[":
            yield from self.call()
            return
        yield
        yield from self.comma_separated(self.call)
        if self.char == "]":  # Models may leave it out.
            yield

    def arguments(self, name: str) -> Reading:
        """Begins a call, and emits the object that follows as its arguments.

        Raises:
            NotACallError: no object follows, or there is no such tool.
        """
        if self.char != "{":
            raise NotACallError
        self.begin_call(name)
        yield from self.pass_arguments(self.value())

    # -- JSON ----------------------------------------------------------------------------------

    def value(self, depth: int = 0) -> Reading:
        """Reads any standard JSON value.

        Models write raw control characters in strings. They are escaped in the output.
        """
        char = self.char
        if depth > _MAX_DEPTH:
            raise NotACallError
        if char == '"':
            yield from self.string()
        elif char == "{":
            yield from self._members(depth, "}")
        elif char == "[":
            yield from self._members(depth, "]")
        elif char in _WORDS:
            yield from self.expect(_WORDS[char])
        else:
            yield from self._number()

    def _members(self, depth: int, close: str) -> Reading:
        yield
        yield from self.space()
        if self.char == close:
            yield
            return
        while True:
            if close == "}":
                yield from self.string()
                yield from self.space()
                yield from self.expect(":")
                yield from self.space()
            yield from self.value(depth + 1)
            yield from self.space()
            if self.char != ",":
                break
            yield
            yield from self.space()
        yield from self.expect(close)

    def _number(self) -> Reading:
        digits = []
        while self.char in _NUMBER_CHARS:
            digits.append(self.char)
            yield
        if not _NUMBER.fullmatch("".join(digits)):
            raise NotACallError

    def string(self) -> Generator[None, None, str]:
        """Reads a string, and returns its value."""
        if self.char != '"':
            raise NotACallError
        raw = ['"']
        yield
        while (char := self.char) != '"':
            if char == "":
                raise NotACallError
            if char == "\\":
                raw.append(char)
                yield
                if self.char == "u":
                    for _ in range(4):
                        raw.append(self.char)
                        yield
                        if self.char not in _HEX:
                            raise NotACallError
                elif not self.char or self.char not in '"\\/bfnrt':
                    raise NotACallError
            elif char < " ":
                self.char = json.dumps(char)[1:-1]
            raw.append(self.char)
            yield
        raw.append('"')
        yield
        text: str = json.loads("".join(raw))
        return text


def _object_text(raw: str) -> str:
    """Returns arguments as the JSON text of an object.

    Some models write that text inside a JSON string, which is then unpacked.

    Raises:
        NotACallError: the arguments are not an object.
    """
    try:
        value = json.loads(raw)
        if isinstance(value, str):
            raw, value = value, json.loads(value)
        raw.encode()
    except (ValueError, RecursionError):
        raise NotACallError from None
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise NotACallError
    return raw
