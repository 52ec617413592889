"""Formats that tag each argument: DeepSeek V3.2 and V4, Kimi K3, MiniCPM5, Hunyuan 3."""

from __future__ import annotations

import html
from collections.abc import Generator, Mapping
from typing import Any, ClassVar

from quire.grammar.lark import Rules
from quire.server.parsers.qwen3_xml import Qwen3XmlParser
from quire.server.parsers.stream import NotACallError

_KINDS = {"integer": "number"}


class TypedTagParser(Qwen3XmlParser):
    """Parses tags that give each argument's type beside its name.

    Attributes:
        type_mark: text between an argument's name and its type.
        type_end: text after the type.
        string_kind: the type that the tag gives to strings.
    """

    type_mark: ClassVar[str]
    type_end: ClassVar[str]
    string_kind: ClassVar[str]
    value_break = ""
    many_per_block = True

    def read_key(self) -> Generator[None, None, tuple[str, str | None]]:
        key = yield from self.read_until(self.type_mark)
        kind = yield from self.read_until(self.type_end)
        return html.unescape(key), "string" if kind == self.string_kind else None

    @classmethod
    def key_tag(cls, key: str, schema: Mapping[str, Any]) -> str:
        return f"{cls.parameter}{key}{cls.type_mark}{cls.kind_of(schema)}{cls.type_end}"

    @classmethod
    def kind_of(cls, schema: Mapping[str, Any]) -> str:
        """Returns the type in the tag. A value of several types is written as JSON."""
        return cls.string_kind if schema.get("type") == "string" else "false"


class DeepSeekV32Parser(TypedTagParser):
    """<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">b</｜DSML｜parameter>
    </｜DSML｜invoke> in a block of function calls: DeepSeek V3.2."""

    name = "deepseek_v32"
    starts = ("<｜DSML｜function_calls>",)
    function, parameter, bracket = '<｜DSML｜invoke name="', '<｜DSML｜parameter name="', '">'
    lenient_starts = (function,)
    type_mark, type_end, string_kind = '" string="', '">', "true"
    value_end, call_end = "</｜DSML｜parameter>", "</｜DSML｜invoke>"
    block_end = "</｜DSML｜function_calls>"
    marks = (block_end, call_end, value_end, parameter)


class DeepSeekV4Parser(DeepSeekV32Parser):
    """The same in a block of another name: DeepSeek V4."""

    name = "deepseek_v4"
    starts = ("<｜DSML｜tool_calls>",)
    block_end = "</｜DSML｜tool_calls>"
    marks = (block_end, *DeepSeekV32Parser.marks[1:])


class KimiK3Parser(TypedTagParser):
    """<|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="string"<|sep|>b
    <|close|>argument<|sep|><|close|>call<|sep|> in a section of tools: Kimi K3.

    The answer's text has a section of its own.
    """

    name = "kimi_k3"
    starts = ("<|open|>tools<|sep|>",)
    lenient_starts = ()
    function, parameter, bracket = '<|open|>call tool="', '<|open|>argument key="', '" index="'
    type_mark, type_end, string_kind = '" type="', '"<|sep|>', "string"
    value_end, call_end = "<|close|>argument<|sep|>", "<|close|>call<|sep|>"
    block_end = "<|close|>tools<|sep|>"
    answer = "<|open|>response<|sep|>"
    text_marks = (answer, "<|close|>response<|sep|>", "<|close|>message<|sep|>")
    marks_text = True
    marks = (block_end, call_end, value_end, parameter)
    gap = call_gap = ""

    def read_name(self) -> Generator[None, None, str]:
        name = yield from self.read_until(self.bracket)
        yield from self.read_until(self.type_end)
        return name

    @classmethod
    def opening_rule(cls, rules: Rules, name: str) -> str:
        begin, end = (
            rules.literal(f"{cls.function}{name}{cls.bracket}"),
            rules.literal(cls.type_end),
        )
        return f"{begin} /[1-9][0-9]{{0,2}}/ {end}"

    @classmethod
    def key_tag(cls, key: str, schema: Mapping[str, Any]) -> str:
        return super().key_tag(key.replace("&", "&amp;").replace('"', "&quot;"), schema)

    @classmethod
    def kind_of(cls, schema: Mapping[str, Any]) -> str:
        kind = schema.get("type")
        return _KINDS.get(kind, kind) if isinstance(kind, str) else "object"

    @classmethod
    def grammar(cls, rules: Rules, tools: Mapping[str, Mapping[str, Any]], parallel: bool) -> str:
        # The model writes the section of the answer's text even if it is empty.
        text, end = rules.literal("".join(cls.text_marks[:2])), rules.literal(cls.text_marks[2])
        return f"({text})? {super().grammar(rules, tools, parallel)} ({end})?"


class MiniCpm5Parser(Qwen3XmlParser):
    """<function name="f"><param name="a">b</param></function>: MiniCPM5.

    A value with other tags is in a CDATA section.
    """

    name = "minicpm5"
    function, parameter, bracket = '<function name="', '<param name="', '">'
    starts = (function,)
    lenient_starts = ()
    value_end, call_end = "</param>", "</function>"
    block_end = call_end
    value_break = gap = ""
    wrap = ("<![CDATA[", "]]>")
    marks = (call_end, value_end)

    def read_name(self) -> Generator[None, None, str]:
        # The mark before a name is ordinary text, so anything else than a name is text at once.
        name = ""
        while self.char != self.bracket[0]:
            name += self.char
            if not self.char or not any(tool.startswith(name) for tool in self.tools):
                raise NotACallError
            yield
        yield from self.expect(self.bracket)
        return name

    @classmethod
    def grammar(cls, rules: Rules, tools: Mapping[str, Mapping[str, Any]], parallel: bool) -> str:
        call = cls.call_rule(rules, tools)
        return f'{call} ("\\n" {call})*' if parallel else call


class HunyuanParser(Qwen3XmlParser):
    """<tool_call:opensource>f<tool_sep:opensource><arg_key:opensource>a</arg_key:opensource>
    <arg_value:opensource>1</arg_value:opensource></tool_call:opensource> in a block: Hunyuan 3."""

    name = "hunyuan"
    starts = ("<tool_calls:opensource>",)
    function, bracket = "<tool_call:opensource>", "<tool_sep:opensource>"
    lenient_starts = (function,)
    parameter, key_end = "<arg_key:opensource>", "</arg_key:opensource>"
    value_begin, value_end = "<arg_value:opensource>", "</arg_value:opensource>"
    call_end, block_end = "</tool_call:opensource>", "</tool_calls:opensource>"
    value_break = ""
    many_per_block = True
    marks = (block_end, call_end, bracket, parameter, key_end, value_begin, value_end)

    def read_key(self) -> Generator[None, None, tuple[str, str | None]]:
        key = yield from self.read_until(self.key_end)
        yield from self.space()
        yield from self.expect(self.value_begin)
        return key, None

    @classmethod
    def key_tag(cls, key: str, schema: Mapping[str, Any]) -> str:
        return f"{cls.parameter}{key}{cls.key_end}\n{cls.value_begin}"
