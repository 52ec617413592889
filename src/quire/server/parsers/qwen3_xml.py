"""<tool_call><function=f><parameter=city>Oslo</parameter></function></tool_call>: Qwen 3 Coder
and Qwen 3.5."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from typing import Any

from quire.server.parsers.grammar import Rules
from quire.server.parsers.stream import NotACallError, Reading, ToolParser, overlap

_END = "</parameter>"
_ENDS = (f"\n{_END}", _END)


class Qwen3XmlParser(ToolParser):
    """Parses calls whose values are bare text.

    A parameter whose schema says so is a string, passed on as it comes. Others are JSON where they
    can be read as such.
    """

    name = "qwen3_xml"
    starts = ("<tool_call>",)
    marks = ("</tool_call>",)
    by_property = True
    in_template = "<function="

    def calls(self) -> Reading:
        yield from self.space()
        yield from self.expect("<function=")
        name = yield from self._until_bracket()
        self.begin(name)
        properties = self.tools[name].get("properties", {})
        keys: set[str] = set()
        while True:
            yield from self.space()
            yield from self.expect("<")
            if self.char == "/":
                break
            yield from self.expect("parameter=")
            key = yield from self._until_bracket()
            if self.char == "\n":
                yield
            if key in keys:
                raise NotACallError
            self.give_arguments(f"{', ' if keys else '{'}{json.dumps(key)}: ")
            keys.add(key)
            yield from self._value(properties.get(key, {}))
        yield from self.expect("/function>")
        self.give_arguments("}" if keys else "{}")
        self.end()
        yield from self.space()
        if self.char == "<":
            yield from self.expect("</tool_call>")

    def _until_bracket(self) -> Generator[None, None, str]:
        letters = []
        while self.char not in ("", ">", "\n"):
            letters.append(self.char)
            yield
        yield from self.expect(">")
        return "".join(letters)

    def _value(self, schema: Any) -> Reading:
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if kind == "string":
            self.give_arguments('"')
            yield from self.passed_on(self._text())
            self.give_arguments('"')
            return
        raw = yield from self.captured(self._text(escape=False))
        try:
            json.loads(raw, parse_constant=_refuse)
            self.give_arguments(raw.strip())
        except (ValueError, RecursionError):
            words = {"True": "true", "False": "false", "None": "null"}
            self.give_arguments(words.get(raw.strip()) or json.dumps(raw, ensure_ascii=False))

    def _text(self, escape: bool = True) -> Reading:
        """Reads up to the end mark; what belongs to the value is consumed."""
        waiting = ""
        while True:
            if self.char == "":
                raise NotACallError
            waiting += self.char
            ended = waiting.endswith(_END)
            if ended:
                out = waiting[: -len(_END)].removesuffix("\n")
            elif waiting[0] in "\n<":
                out = waiting[: len(waiting) - overlap(waiting, _ENDS)]
                waiting = waiting[len(out) :]
            else:
                out, waiting = waiting, ""
            self.char = json.dumps(out, ensure_ascii=False)[1:-1] if escape else out
            yield
            if ended:
                return

    @classmethod
    def grammar(cls, rules: Rules, tools: Mapping[str, Mapping[str, Any]], parallel: bool) -> str:
        call = rules.any_of(
            "{} {} {}".format(
                rules.literal(f"<tool_call>\n<function={name}>\n"),
                _parameters(rules, schema),
                rules.literal("</function>\n</tool_call>"),
            )
            for name, schema in tools.items()
        )
        return f'{call} ("\\n" {call})*' if parallel else call


def _parameters(rules: Rules, schema: Mapping[str, Any]) -> str:
    """Returns a rule of the properties in their order, each at most once."""
    parts = []
    for key in schema.get("properties", {}):
        whole = rules.property(schema, key)
        if whole.get("type") != "string":
            inner = f"{rules.json(whole)} {rules.literal(f'{chr(10)}{_END}')}"
        elif "enum" in whole:
            choices = rules.any_of(rules.literal(str(item)) for item in whole["enum"])
            inner = f"{choices} {rules.literal(f'{chr(10)}{_END}')}"
        else:
            inner = rules.add_until(f"\n{_END}")
        part = f'{rules.literal(f"<parameter={key}>{chr(10)}")} {inner} "\\n"'
        parts.append(part if key in schema.get("required", ()) else f"({part})?")
    return " ".join(parts) or '""'


def _refuse(constant: str) -> None:
    raise ValueError(constant)
