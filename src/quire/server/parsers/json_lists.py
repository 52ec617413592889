"""A mark and a list of calls as JSON objects: Granite 3, Phi 4 mini, Command R and A, Apertus."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from quire.grammar.lark import Rules
from quire.server.parsers.json_calls import JsonToolParser
from quire.server.parsers.stream import Reading


class JsonListParser(JsonToolParser):
    """Parses a list between marks; a single object may stand for a list of one.

    Attributes:
        close: follows the list, or does not.
        keys: the names of a call's name and arguments, as the model writes them.
    """

    close: ClassVar[str] = ""
    keys: ClassVar[tuple[str, str]] = ("name", "arguments")

    def calls(self) -> Reading:
        yield from self.space()
        yield from self.in_fence(self.one_or_list)
        if self.close and self.char == self.close[0]:
            yield from self.expect(self.close)

    @classmethod
    def around(cls, name: str) -> tuple[str, str]:
        """Returns the text before and after a call's arguments."""
        function, arguments = cls.keys
        return f'{{"{function}": {json.dumps(name)}, "{arguments}": ', "}"

    @classmethod
    def grammar(cls, rules: Rules, tools: Mapping[str, Mapping[str, Any]], parallel: bool) -> str:
        calls = []
        for name, schema in tools.items():
            before, after = cls.around(name)
            calls.append(f"{rules.literal(before)} {rules.json(schema)} {rules.literal(after)}")
        call = rules.any_of(calls)
        more = f'(", " {call})*' if parallel else ""
        return f'{rules.literal(cls.starts[0])} "[" {call} {more} "]" {rules.literal(cls.close)}'


class GraniteParser(JsonListParser):
    """<|tool_call|>[{"name": "f", "arguments": {...}}]: Granite 3."""

    name = "granite"
    starts = ("<|tool_call|>", "<tool_call>")


class Phi4Parser(JsonListParser):
    """<|tool_call|>[{"name": "f", "arguments": {...}}]<|/tool_call|>: Phi 4 mini."""

    name = "phi4_mini"
    starts = ("<|tool_call|>",)
    close = "<|/tool_call|>"
    marks = (close,)


class CommandParser(JsonListParser):
    """<|START_ACTION|>[{"tool_name": "f", "parameters": {...}}]<|END_ACTION|>: Command R7B, A."""

    name = "command"
    starts = ("<|START_ACTION|>",)
    close = "<|END_ACTION|>"
    marks = (close,)
    keys = ("tool_name", "parameters")


class ApertusParser(JsonListParser):
    """<|tools_prefix|>[{"f": {...}}]<|tools_suffix|>: Apertus."""

    name = "apertus"
    starts = ("<|tools_prefix|>",)
    close = "<|tools_suffix|>"
    marks = (close,)

    def call(self) -> Reading:
        yield from self.expect("{")
        yield from self.space()
        name = yield from self.string()
        yield from self.space()
        yield from self.expect(":")
        yield from self.space()
        yield from self.arguments(name)
        yield from self.space()
        if self.char == "}":
            yield
        self.end()

    @classmethod
    def around(cls, name: str) -> tuple[str, str]:
        return f"{{{json.dumps(name)}: ", "}"
