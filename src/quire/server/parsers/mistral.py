"""[TOOL_CALLS] with a list of {"name": "f", "arguments": {...}}, or newer f[ARGS]{...}: Mistral."""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping
from typing import Any

from quire.grammar.lark import Rules
from quire.server.parsers.json_calls import JsonToolParser
from quire.server.parsers.stream import Reading

_NAME = frozenset(string.ascii_letters + string.digits + "_-.")


class MistralParser(JsonToolParser):
    name = "mistral"
    starts = ("[TOOL_CALLS]",)
    marks = ("[ARGS]", "[CALL_ID]")

    def calls(self) -> Reading:
        yield from self.space()
        if self.char in _NAME:
            yield from self._one()
        else:
            yield from self.in_fence(self.one_or_list)

    def _one(self) -> Reading:
        """Reads a name, an id if there is one, and arguments; the next call has a mark of its
        own."""
        letters = []
        while self.char in _NAME:
            letters.append(self.char)
            yield
        while self.char == "[":
            yield
            if self.char == "A":
                yield from self.expect("ARGS]")
                break
            yield from self.expect("CALL_ID]")
            while self.char in _NAME:
                yield
        yield from self.space()
        yield from self.arguments("".join(letters))
        self.end()

    def new_id(self) -> str:
        """Returns nine letters and digits: Mistral's templates take no other ids."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    @classmethod
    def grammar(cls, rules: Rules, tools: Mapping[str, Mapping[str, Any]], parallel: bool) -> str:
        if "[ARGS]" in rules.template:
            call = rules.any_of(
                f"{rules.literal(f'[TOOL_CALLS]{name}[ARGS]')} {rules.json(schema)}"
                for name, schema in tools.items()
            )
            return f"{call}+" if parallel else call
        call = rules.any_of(
            "{} {} {}".format(
                rules.literal(f'{{"name": "{name}", "arguments": '), rules.json(schema), '"}"'
            )
            for name, schema in tools.items()
        )
        more = f'(", " {call})*' if parallel else ""
        return f'{rules.literal("[TOOL_CALLS][")} {call} {more} "]"'
