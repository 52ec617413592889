"""<tool_call>{"name": "f", "arguments": {...}}</tool_call>: Hermes, Qwen 2.5 and Qwen 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.grammar.lark import Rules
from quire.server.parsers.json_calls import JsonToolParser
from quire.server.parsers.stream import Reading


class HermesParser(JsonToolParser):
    name = "hermes"
    starts = ("<tool_call>",)
    fenced = "{["
    marks = ("</tool_call>",)

    def calls(self) -> Reading:
        self.needs_arguments = not self.marked
        yield from self.space()
        yield from self.in_fence(self._objects)
        if self.char == "<" and self.marked:
            yield from self.expect("</tool_call>")

    def _objects(self) -> Reading:
        yield from self.one_or_list()
        # Models leave out the closing mark, or write a brace too many before it.
        yield from self.space(also="}")

    @classmethod
    def grammar(cls, rules: Rules, tools: Mapping[str, Mapping[str, Any]], parallel: bool) -> str:
        call = rules.any_of(
            "{} {} {}".format(
                rules.literal(f'<tool_call>\n{{"name": "{name}", "arguments": '),
                rules.json(schema),
                rules.literal("}\n</tool_call>"),
            )
            for name, schema in tools.items()
        )
        return f'{call} ("\\n" {call})*' if parallel else call
