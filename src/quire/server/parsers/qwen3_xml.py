"""<tool_call><function=f><parameter=city>Oslo</parameter></function></tool_call>: Qwen 3 Coder
and Qwen 3.5."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Mapping
from typing import Any, ClassVar
from urllib.parse import unquote

from quire.grammar.bounded import resolve
from quire.grammar.lark import Rules
from quire.server.parsers.pythonic import json_text
from quire.server.parsers.stream import NotACallError, Reading, ToolParser, overlap

_WORDS = {"True": "true", "False": "false", "None": "null"}
_MOST_SCHEMAS = 64
"""Most schemas, reached through references and options, to examine for one value."""


class Qwen3XmlParser(ToolParser):
    """Parses calls whose values are unquoted text.

    If a parameter's schema has the type string, its text is a string and is emitted as it arrives.
    Any other text is JSON if it parses and the schema allows that type. If not, and the schema
    allows strings, it is a string.

    Models may leave out the mark that begins a block, or the one that ends a call.

    Attributes:
        function: mark before a function's name.
        parameter: mark before a parameter's name.
        bracket: mark after either name.
        value_end: mark after a value.
        call_end: mark after a call.
        block_end: mark after a block, which the first mark began.
        value_break: text around a value.
        wrap: marks inside of the value's marks that models may add around it.
        gap: text between the tags of a call.
        call_gap: text around a call in a block.
        many_per_block: a block may have several calls.
    """

    name = "qwen3_xml"
    starts = ("<tool_call>",)
    function: ClassVar[str] = "<function="
    lenient_starts: ClassVar[tuple[str, ...]] = (function,)
    parameter: ClassVar[str] = "<parameter="
    bracket: ClassVar[str] = ">"
    value_end: ClassVar[str] = "</parameter>"
    call_end: ClassVar[str] = "</function>"
    block_end: ClassVar[str] = "</tool_call>"
    value_break: ClassVar[str] = "\n"
    wrap: ClassVar[tuple[str, str]] = ("", "")
    gap: ClassVar[str] = "\n"
    call_gap: ClassVar[str] = "\n"
    many_per_block: ClassVar[bool] = False
    marks: ClassVar[tuple[str, ...]] = (block_end,)
    by_property = True
    bare_strings = True

    def calls(self) -> Reading:
        if self.read_so_far.endswith(self.function):
            yield from self._calls()
        else:
            yield from self.space()
            yield from self.optional_fence(self._marked_calls)
        if self.char == self.block_end[0] and not self._ended:
            yield from self.expect(self.block_end)

    def _marked_calls(self) -> Reading:
        yield from self.expect(self.function)
        yield from self._calls()

    def _calls(self) -> Reading:
        self._ended = False  # True once the mark that ends the block was read
        while not self._ended:
            yield from self._call()
            yield from self.space()
            if self._ended or not self.many_per_block or self.char != self.block_end[0]:
                return
            mark = yield from self.one_of(self.function, self.block_end)
            self._ended = mark == self.block_end

    def _call(self) -> Reading:
        name = yield from self.read_name()
        self.begin_call(name)
        keys: set[str] = set()
        while True:
            yield from self.space()
            if not self.char and self.stopped:
                break
            mark = yield from self.one_of(self.parameter, self.call_end, self.block_end)
            if mark != self.parameter:
                self._ended = mark == self.block_end
                break
            key, kind = yield from self.read_key()
            yield from self.read_value(name, key, keys, kind)
        self.emit_arguments("}" if keys else "{}")
        self.end_call()

    def read_name(self) -> Generator[None, None, str]:
        """Reads the rest of the tag that begins a call, and returns the tool's name."""
        return (yield from self.read_until(self.bracket))

    def read_key(self) -> Generator[None, None, tuple[str, str | None]]:
        """Reads the rest of a parameter's opening tag.

        Returns:
            The parameter's name, and the JSON Schema type that the tag gives it, or None.
        """
        return (yield from self.read_until(self.bracket)), None

    def read_value(self, name: str, key: str, keys: set[str], kind: str | None = None) -> Reading:
        """Reads the value of a parameter, and adds its name to `keys`.

        Args:
            kind: the type in the tag, which decides if the schema allows several types.

        Raises:
            NotACallError: `keys` has the name already.
        """
        if self.value_break and self.char == self.value_break:
            yield
        if key in keys:
            raise NotACallError
        self.emit_arguments(f"{', ' if keys else '{'}{json.dumps(key)}: ")
        keys.add(key)
        tool = self.tools[name]
        yield from self._value(tool.get("properties", {}).get(key, {}), tool, kind)

    def read_until(self, end: str) -> Generator[None, None, str]:
        """Reads a name and the mark `end`; returns the name."""
        letters = []
        while self.char not in ("", end[0], "\n"):
            letters.append(self.char)
            yield
        yield from self.expect(end)
        return "".join(letters)

    def _value(self, schema: Any, tool: Mapping[str, Any], tagged: str | None) -> Reading:
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        types = None if kind == "string" else types_of(schema, tool)
        if tagged is not None and kind != "string" and (types is None or tagged in types):
            kind = tagged
        if kind == "string":
            self.emit_arguments('"')
            yield from self.pass_arguments(self._text())
            self.emit_arguments('"')
            return
        raw = yield from self.capture(self._text(escape=False))
        self.emit_arguments(as_json(raw, types))

    def _text(self, escape: bool = True) -> Reading:
        """Reads a value and its end mark. Only the value's text counts as consumed."""
        waiting, opening, end = "", self.wrap[0], self.value_end
        marks = (f"{self.value_break}{end}", end, *filter(None, [opening]))
        firsts = {mark[0] for mark in marks}
        while True:
            if self.char == "":
                raise NotACallError
            waiting += self.char
            if opening and waiting == opening:
                waiting, opening, end = "", "", f"{self.wrap[1]}{end}"
                marks, firsts = (end,), {end[0]}
            ended = waiting.endswith(end)
            if ended:
                out = waiting[: -len(end)].removesuffix(self.value_break)
            elif waiting and waiting[0] in firsts:
                out = waiting[: len(waiting) - overlap(waiting, marks)]
                waiting = waiting[len(out) :]
            else:
                out, waiting = waiting, ""
            opening = "" if out else opening
            self.char = json.dumps(out, ensure_ascii=False)[1:-1] if escape else out
            yield
            if ended:
                return

    @classmethod
    def grammar(cls, rules: Rules, tools: Mapping[str, Mapping[str, Any]], parallel: bool) -> str:
        begin, end = rules.literal(f"{cls.starts[0]}{cls.call_gap}"), rules.literal(cls.block_end)
        gap, call = rules.literal(cls.call_gap), cls.call_rule(rules, tools)
        if cls.many_per_block:
            more = f"({gap} {call})*" if parallel else ""
            return f"{begin} {call} {more} {gap} {end}"
        block = f"{begin} {call} {gap} {end}"
        return f'{block} ("\\n" {block})*' if parallel else block

    @classmethod
    def call_rule(cls, rules: Rules, tools: Mapping[str, Mapping[str, Any]]) -> str:
        """Adds a rule for one call without the marks of its block, and returns its name."""
        return rules.any_of(
            f"{cls.opening_rule(rules, name)} {rules.literal(cls.gap)} "
            f"{cls._parameters(rules, schema)} {rules.literal(cls.call_end)}"
            for name, schema in tools.items()
        )

    @classmethod
    def opening_rule(cls, rules: Rules, name: str) -> str:
        """Returns a rule for the tag that begins a call."""
        return rules.literal(f"{cls.function}{name}{cls.bracket}")

    @classmethod
    def key_tag(cls, key: str, schema: Mapping[str, Any]) -> str:
        """Returns the tag that begins a parameter.

        Args:
            schema: of the parameter.
        """
        return f"{cls.parameter}{key}{cls.bracket}"

    @classmethod
    def _parameters(cls, rules: Rules, schema: Mapping[str, Any]) -> str:
        """Returns a rule for the properties in their order; optional ones may be left out."""
        parts, required = [], frozenset(schema.get("required", ()))
        for key in schema.get("properties", {}):
            value = rules.property(schema, key)
            before = rules.literal(f"{cls.key_tag(key, value)}{cls.value_break}")
            part = f"{before} {cls.value_rule(rules, value)} {rules.literal(cls.gap)}"
            parts.append(part if key in required else f"({part})?")
        return " ".join(parts) or '""'

    @classmethod
    def value_rule(cls, rules: Rules, schema: Mapping[str, Any]) -> str:
        """Returns a rule for a value and its end mark."""
        end = f"{cls.value_break}{cls.value_end}"
        if schema.get("type") != "string":
            return f"{rules.json(schema)} {rules.literal(end)}"
        return rules.bare_string(schema, end)


class SeedOssParser(Qwen3XmlParser):
    """<seed:tool_call><function=f><parameter=a>1</parameter></function></seed:tool_call>: Seed
    OSS."""

    name = "seed_oss"
    starts = ("<seed:tool_call>",)
    block_end = "</seed:tool_call>"
    value_break = ""
    marks = (block_end,)


class MiniMaxM2Parser(Qwen3XmlParser):
    """<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke>
    </minimax:tool_call>: MiniMax M2."""

    name = "minimax_m2"
    starts = ("<minimax:tool_call>",)
    function, parameter, bracket = '<invoke name="', '<parameter name="', '">'
    lenient_starts = (function,)
    call_end, block_end = "</invoke>", "</minimax:tool_call>"
    value_break = ""
    many_per_block = True
    marks = (block_end,)


class Glm45Parser(Qwen3XmlParser):
    """<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>: GLM 4.5 and later."""

    name = "glm45"
    lenient_starts = ()
    parameter, bracket, value_end = "<arg_key>", "</arg_key>", "</arg_value>"
    call_end, value_break = "</tool_call>", ""
    marks = ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def calls(self) -> Reading:
        yield from self.space()
        letters = []
        while self.char not in ("", "<", "\n"):
            letters.append(self.char)
            if not any(tool.startswith("".join(letters)) for tool in self.tools):
                raise NotACallError
            yield
        name = "".join(letters)
        if not self.char:
            raise NotACallError
        self.begin_call(name)
        keys: set[str] = set()
        while True:
            yield from self.space()
            if (yield from self.one_of(self.parameter, self.call_end)) == self.call_end:
                break
            key = yield from self.read_until(self.bracket)
            yield from self.space()
            yield from self.expect("<arg_value>")
            yield from self.read_value(name, key, keys)
        self.emit_arguments("}" if keys else "{}")
        self.end_call()

    @classmethod
    def grammar(cls, rules: Rules, tools: Mapping[str, Mapping[str, Any]], parallel: bool) -> str:
        calls = []
        for name, schema in tools.items():
            parts = [rules.literal(f"<tool_call>{name}\n")]
            required = frozenset(schema.get("required", ()))
            for key in schema.get("properties", {}):
                before = rules.literal(f"<arg_key>{key}</arg_key>\n<arg_value>")
                inner = cls.value_rule(rules, rules.property(schema, key))
                part = f'{before} {inner} "\\n"'
                parts.append(part if key in required else f"({part})?")
            calls.append(f"{' '.join(parts)} {rules.literal('</tool_call>')}")
        call = rules.any_of(calls)
        return f'{call} ("\\n" {call})*' if parallel else call


def as_json(raw: str, types: set[str] | None) -> str:
    """Returns a value as JSON text.

    Args:
        types: the types that the schema allows; None allows any.
    """
    text = _WORDS.get(raw.strip(), raw.strip())
    may_be_text = types is not None and "string" in types
    try:
        kinds = _kinds_of(json.loads(text, parse_constant=_refuse))
        if not may_be_text or (types is not None and kinds & types):
            return text
    except (ValueError, RecursionError):
        if types is not None and not may_be_text:
            # Models also write Python's syntax, such as {'a': True}.
            with contextlib.suppress(NotACallError):
                return json_text(raw)
    return json.dumps(raw, ensure_ascii=False)


def _kinds_of(value: Any) -> set[str]:
    """Returns the JSON Schema types that a value has."""
    match value:
        case bool():
            return {"boolean"}
        case int() | float():
            whole = isinstance(value, int) or value.is_integer()
            return {"number", "integer"} if whole else {"number"}
        case str():
            return {"string"}
        case None:
            return {"null"}
    return {"array" if isinstance(value, list) else "object"}


def types_of(schema: Any, tool: Mapping[str, Any]) -> set[str] | None:
    """Returns the types that a schema allows; None if it does not restrict them.

    Args:
        tool: the document in which the schema's references are resolved.
    """
    types: set[str] = set()
    waiting, seen = [schema], 0
    while waiting:
        schema, seen = waiting.pop(), seen + 1
        if not isinstance(schema, Mapping) or seen > _MOST_SCHEMAS:
            return None
        given, reference = schema.get("type"), schema.get("$ref")
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        options = schema.get("anyOf", schema.get("oneOf"))
        if given is not None:
            types |= {str(name) for name in (given if isinstance(given, list) else [given])}
        elif isinstance(reference, str):
            waiting.append(resolve(tool, unquote(reference)))
        elif isinstance(values, list):
            types = types.union(*map(_kinds_of, values))
        elif isinstance(options, list):
            waiting += options
        else:
            return None
    return types


def _refuse(constant: str) -> None:
    raise ValueError(constant)
