"""Tool calls written as JSON: Granite, Phi 4, Command, Apertus, Hermes, Llama 3, Mistral."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping
from typing import Any, ClassVar

from quire.grammar.lark import Rules
from quire.server.parsers.json_calls import JsonToolParser
from quire.server.parsers.stream import Reading


class JsonListParser(JsonToolParser):
    """Parses a list of calls between marks, or a single call in place of the list.

    Attributes:
        close: mark after the list, which models may leave out.
        keys: the JSON keys of a call's name and of its arguments.
    """

    close: ClassVar[str] = ""
    keys: ClassVar[tuple[str, str]] = ("name", "arguments")

    def calls(self) -> Reading:
        yield from self.space()
        yield from self.optional_fence(self.one_or_list)
        if self.close and self.char == self.close[0]:
            yield from self.expect(self.close)

    @classmethod
    def text_around(cls, name: str) -> tuple[str, str]:
        """Returns the text before a call's arguments, and the text after them."""
        function, arguments = cls.keys
        return f'{{"{function}": {json.dumps(name)}, "{arguments}": ', "}"

    @classmethod
    def grammar(cls, rules: Rules, tools: Mapping[str, Mapping[str, Any]], parallel: bool) -> str:
        calls = []
        for name, schema in tools.items():
            before, after = cls.text_around(name)
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
        self.end_call()

    @classmethod
    def text_around(cls, name: str) -> tuple[str, str]:
        return f"{{{json.dumps(name)}: ", "}"


# <tool_call>{"name": "f", "arguments": {...}}</tool_call>: Hermes, Qwen 2.5 and Qwen 3.


class HermesParser(JsonToolParser):
    name = "hermes"
    starts = ("<tool_call>",)
    fence_chars = "{["
    marks = ("</tool_call>",)

    def calls(self) -> Reading:
        self.needs_arguments = not self.began_with_mark
        yield from self.space()
        yield from self.optional_fence(self._objects)
        if self.char == "<" and self.began_with_mark:
            yield from self.expect("</tool_call>")

    def _objects(self) -> Reading:
        yield from self.one_or_list()
        # Models may write one closing brace too many.
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


# {"name": "f", "parameters": {...}}, alone or several with semicolons between: Llama 3.1, 3.2.


class Llama3JsonParser(JsonToolParser):
    """Parses Llama's JSON calls, which begin with a brace or with <|python_tag|>.

    A call may also follow other text, unless a grammar enforces the calls.
    """

    name = "llama3_json"
    starts = ("<|python_tag|>",)
    first_chars = "{"
    lenient_starts = ("{",)
    needs_arguments = True

    def calls(self) -> Reading:
        while True:
            yield from self.space()
            yield from self.optional_fence(self.call)
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


# [TOOL_CALLS] with a list of {"name": "f", "arguments": {...}}, or newer f[ARGS]{...}: Mistral.

_NAME = frozenset(string.ascii_letters + string.digits + "_-.")


class MistralParser(JsonToolParser):
    name = "mistral"
    starts = ("[TOOL_CALLS]",)
    marks = ("[ARGS]", "[CALL_ID]")

    def calls(self) -> Reading:
        yield from self.space()
        if self.char in _NAME:
            yield from self._read_call()
        else:
            yield from self.optional_fence(self.one_or_list)

    def _read_call(self) -> Reading:
        """Reads a name, an optional id, and arguments. The next call has its own mark."""
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
        self.end_call()

    def new_id(self) -> str:
        """Returns nine letters and digits, because Mistral's templates refuse other ids."""
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
