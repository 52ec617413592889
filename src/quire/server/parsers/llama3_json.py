"""{"name": "f", "parameters": {...}}, alone or several with semicolons between: Llama 3.1, 3.2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.grammar.lark import Rules
from quire.server.parsers.json_calls import JsonToolParser
from quire.server.parsers.stream import Reading


class Llama3JsonParser(JsonToolParser):
    """Parses Llama's JSON calls, which begin with a brace, or with <|python_tag|>.

    JSON behind other text is a call too, unless a grammar enforces calls.
    """

    name = "llama3_json"
    starts = ("<|python_tag|>",)
    first = "{"
    loose = ("{",)
    needs_arguments = True

    def calls(self) -> Reading:
        while True:
            yield from self.space()
            yield from self.in_fence(self.call)
            yield from self.space()
            if self.char != ";":
                return
            yield

    @classmethod
    def grammar(cls, rules: Rules, tools: Mapping[str, Mapping[str, Any]], parallel: bool) -> str:
        call = rules.any_of(
            "{} {} {}".format(
                rules.literal(f'{{"name": "{name}", "parameters": '),
                rules.json(schema),
                rules.literal("}"),
            )
            for name, schema in tools.items()
        )
        return f'{call} ("; " {call})*' if parallel else call
