"""<|tool_call>call:f{city:<|"|>Oslo<|"|>,days:3}<tool_call|>: Gemma 4, and FunctionGemma."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from typing import Any, ClassVar

from quire.grammar.lark import Rules
from quire.server.parsers.json_calls import JsonToolParser
from quire.server.parsers.stream import NotACallError, Reading

_MAX_DEPTH = 100


class GemmaParser(JsonToolParser):
    """Parses calls with unquoted keys, and with strings between marks and without escapes.

    An argument is emitted when it is complete. JSON's own strings and keys are accepted too.

    Attributes:
        quote: mark before and after a string.
        close: mark after a call.
    """

    name = "gemma4"
    starts = ("<|tool_call>",)
    quote: ClassVar[str] = '<|"|>'
    close: ClassVar[str] = "<tool_call|>"
    marks = (close, quote)
    by_property = True
    bare_strings = True

    def calls(self) -> Reading:
        yield from self.space()
        yield from self.expect("call:")
        name = (yield from self._word("{")).strip()
        if name not in self.tools:
            raise NotACallError
        yield
        self.begin_call(name)
        count = 0
        while (yield from self._has_next("}", count)):
            key, value = yield from self._pair(0)
            self.emit_arguments(f"{', ' if count else '{'}{json.dumps(key)}: {value}")
            count += 1
        self.emit_arguments("}" if count else "{}")
        self.end_call()
        yield from self.space()
        if self.char == self.close[0]:
            yield from self.expect(self.close)

    def _has_next(self, close: str, count: int) -> Generator[None, None, bool]:
        """Reads the text before a member; returns False at the closing bracket."""
        yield from self.space()
        if self.char == close:
            yield
            return False
        if count:
            yield from self.expect(",")
            yield from self.space()
        return True

    def _pair(self, depth: int) -> Generator[None, None, tuple[str, str]]:
        if self.char in ('"', self.quote[0]):
            key = json.loads((yield from self._value(depth)))
        else:
            key = (yield from self._word(":")).strip()
        yield from self.space()
        yield from self.expect(":")
        yield from self.space()
        return key, (yield from self._value(depth))

    def _value(self, depth: int) -> Generator[None, None, str]:
        """Reads a value, and returns it as JSON text."""
        if depth > _MAX_DEPTH:
            raise NotACallError
        if self.char == self.quote[0]:
            return json.dumps((yield from self._quoted()), ensure_ascii=False)
        if self.char not in ("{", "["):
            return (yield from self.capture(self.value()))
        close = "}" if self.char == "{" else "]"
        yield
        parts: list[str] = []
        while (yield from self._has_next(close, len(parts))):
            if close == "}":
                key, value = yield from self._pair(depth + 1)
                parts.append(f"{json.dumps(key)}: {value}")
            else:
                parts.append((yield from self._value(depth + 1)))
        return f"{{{', '.join(parts)}}}" if close == "}" else f"[{', '.join(parts)}]"

    def _quoted(self) -> Generator[None, None, str]:
        yield from self.expect(self.quote)
        text = ""
        while not text.endswith(self.quote):
            if not self.char:
                raise NotACallError
            text += self.char
            yield
        return text[: -len(self.quote)]

    def _word(self, end: str) -> Generator[None, None, str]:
        """Reads up to the character `end`, which it does not consume."""
        letters = []
        while self.char != end:
            if not self.char or self.char in '\n"<>{}':
                raise NotACallError
            letters.append(self.char)
            yield
        return "".join(letters)

    @classmethod
    def grammar(cls, rules: Rules, tools: Mapping[str, Mapping[str, Any]], parallel: bool) -> str:
        call = rules.any_of(
            f"{rules.literal(f'{cls.starts[0]}call:{name}{{')} "
            f"{rules.members(schema, lambda key: f'{key}:', ',', cls._value_rule)} "
            f"{rules.literal(f'}}{cls.close}')}"
            for name, schema in tools.items()
        )
        return f"{call} {call}*" if parallel else call

    @classmethod
    def _value_rule(cls, rules: Rules, schema: Mapping[str, Any]) -> str:
        if schema.get("type") != "string":
            return rules.json(schema)
        return f"{rules.literal(cls.quote)} {rules.bare_string(schema, cls.quote)}"


class FunctionGemmaParser(GemmaParser):
    """<start_function_call>call:f{city:<escape>Oslo<escape>}<end_function_call>."""

    name = "functiongemma"
    starts = ("<start_function_call>",)
    quote = "<escape>"
    close = "<end_function_call>"
    marks = (close, quote)
