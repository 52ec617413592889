"""Tool calls written as JSON objects with a name and arguments, alone or in lists."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from quire.grammar.lark import Rules
from quire.server.parsers.json_calls import JsonToolParser
from quire.server.parsers.stream import Reading


class JsonListParser(JsonToolParser):
    """Parses a list of calls between marks, or a single call in place of the list.

    Attributes:
        close: mark after the list, which models may leave out.
        list_open, list_close: brackets of the list in the grammar.
        keys: the JSON keys of a call's name and of its arguments.
    """

    close: ClassVar[str] = ""
    list_open: ClassVar[str] = "["
    list_close: ClassVar[str] = "]"
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
        begin = rules.literal(cls.starts[0] + cls.list_open)
        return f"{begin} {call} {more} {rules.literal(cls.list_close + cls.close)}"

    @classmethod
    def write(cls, calls: Sequence[tuple[str, dict[str, Any]]]) -> str | None:
        if not cls.hints:
            return None
        pairs = ((cls.text_around(name), json.dumps(values)) for name, values in calls)
        entries = ", ".join(f"{before}{values}{after}" for (before, after), values in pairs)
        return f"{cls.starts[0]}{cls.list_open}{entries}{cls.list_close}{cls.close}"


class GraniteParser(JsonListParser):
    """<|tool_call|>[{"name": "f", "arguments": {...}}]: Granite 3."""

    name = "granite"
    starts = ("<|tool_call|>", "<tool_call>")
    hints = ("respond only with <|tool_call|> followed by a JSON list",)


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


class CommandRParser(JsonListParser):
    """Action: and a list [{"tool_name": "f", "parameters": {...}}] in a block of code: Command R
    and R+."""

    name = "command_r"
    starts = ("Action:",)
    list_open, list_close = "\n```json\n[", "]```"
    keys = ("tool_name", "parameters")


class NemotronParser(JsonListParser):
    """<TOOLCALL>[{"name": "f", "arguments": {...}}]</TOOLCALL>: Nemotron Nano 2."""

    name = "nemotron"
    starts = ("<TOOLCALL>",)
    close = "</TOOLCALL>"
    marks = (close,)


class AprielParser(JsonListParser):
    """<tool_calls>[{"name": "f", "arguments": {...}}]</tool_calls>: Apriel, Hunyuan A13B."""

    name = "apriel"
    starts = ("<tool_calls>",)
    close = "</tool_calls>"
    marks = (close,)
    text_marks = ("[END FINAL RESPONSE]",)


class MiniMaxM1Parser(JsonToolParser):
    """<tool_calls> with a JSON object on each line, and </tool_calls>: MiniMax M1."""

    name = "minimax_m1"
    starts = ("<tool_calls>",)
    close = "</tool_calls>"
    marks = (close,)

    def calls(self) -> Reading:
        yield from self.space()
        yield from self.optional_fence(self._lines)
        if self.char == "<":
            yield from self.expect(self.close)

    def _lines(self) -> Reading:
        yield from self.call()
        yield from self.space()
        while self.char == "{":
            yield from self.call()
            yield from self.space()

    @classmethod
    def grammar(cls, rules: Rules, tools: Mapping[str, Mapping[str, Any]], parallel: bool) -> str:
        call = _object_rule(rules, tools)
        more = f'("\\n" {call})*' if parallel else ""
        begin, end = rules.literal(f"{cls.starts[0]}\n"), rules.literal(f"\n{cls.close}")
        return f"{begin} {call} {more} {end}"


class GigaChatParser(JsonToolParser):
    """<|function_call|>{"name": "f", "arguments": {...}}: GigaChat 3.1."""

    name = "gigachat31"
    starts = ("<|function_call|>",)
    before: ClassVar[str] = ""
    """Text before the mark of a call."""

    def calls(self) -> Reading:
        yield from self.space()
        yield from self.call()

    @classmethod
    def grammar(cls, rules: Rules, tools: Mapping[str, Mapping[str, Any]], parallel: bool) -> str:
        call = f"{rules.literal(cls.before + cls.starts[0])} {_object_rule(rules, tools)}"
        return f"{call} ({call})*" if parallel else call


class GigaChat3Parser(GigaChatParser):
    """A message of the role "function call" with {"name": "f", "arguments": {...}}: GigaChat 3."""

    name = "gigachat3"
    starts = ("function call<|role_sep|>\n",)
    before = "<|message_sep|>\n\n"
    text_marks = ("<|message_sep|>",)
    marks_text = True


def _object_rule(rules: Rules, tools: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a rule for an object with a tool's name and its arguments."""
    end = rules.literal("}")
    return rules.any_of(
        f"{rules.literal(JsonListParser.text_around(name)[0])} {rules.json(schema)} {end}"
        for name, schema in tools.items()
    )


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
