"""<invoke name="f"><city>Oslo</city></invoke>, with a mark before every tag: MiniMax M3."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from typing import Any
from urllib.parse import unquote

from quire.grammar.bounded import resolve
from quire.grammar.keywords import ANNOTATIONS
from quire.grammar.lark import Rules
from quire.server.parsers.qwen3_xml import Qwen3XmlParser, as_json, types_of
from quire.server.parsers.stream import NotACallError, Reading

_MARK = "]<]minimax[>["
_ITEM = "item"
_MAX_DEPTH = 50
_PLAIN_OBJECT = ANNOTATIONS | {"type", "properties", "required", "additionalProperties"}
_PLAIN_ARRAY = ANNOTATIONS | {"type", "items"}
_PLAIN_STRING = ANNOTATIONS | {"type", "enum", "const"}


class MiniMaxM3Parser(Qwen3XmlParser):
    """Parses calls whose arguments are elements. Objects and arrays are elements inside of them.

    The schema tells an array from an object, and a string from other values. A string is emitted as
    it arrives. Any other argument is emitted when it is complete.
    """

    name = "minimax_m3"
    starts = (f"{_MARK}<tool_call>",)
    function, bracket = f'{_MARK}<invoke name="', '">'
    lenient_starts = (function,)
    call_end, block_end = f"{_MARK}</invoke>", f"{_MARK}</tool_call>"
    parameter = f"{_MARK}<"
    value_end: str  # type: ignore[misc]  # a tag with the parameter's name
    value_break = gap = ""
    many_per_block = True
    marks = (block_end, call_end)

    def _call(self) -> Reading:
        name = yield from self.read_name()
        self.begin_call(name)
        tool, keys = self.tools[name], set[str]()
        while True:
            yield from self.space()
            if not self.char and self.stopped:
                break
            yield from self.expect(self.parameter)
            if self.char == "/":
                ends = (self.call_end, self.block_end)
                end = yield from self.one_of(*(each[len(self.parameter) :] for each in ends))
                self._ended = self.block_end.endswith(end)
                break
            key = yield from self.read_until(">")
            schema = _child(tool, key, tool)
            if isinstance(schema, Mapping) and schema.get("type") == "string":
                self.value_end = f"{_MARK}</{key}>"
                yield from self.read_value(name, key, keys)
                continue
            value = yield from self._element(key, schema, tool, 0)
            if key in keys:
                raise NotACallError
            self.emit_arguments(f"{', ' if keys else '{'}{json.dumps(key)}: {value}")
            keys.add(key)
        self.emit_arguments("}" if keys else "{}")
        self.end_call()

    def _element(
        self, name: str, schema: Any, tool: Mapping[str, Any], depth: int
    ) -> Generator[None, None, str]:
        """Reads the rest of an element, and returns its value as JSON text.

        Args:
            tool: the document in which the schema's references are resolved.
        """
        text, children = "", list[tuple[str, str]]()
        if depth > _MAX_DEPTH:
            raise NotACallError
        while True:
            while not text.endswith(_MARK):
                text += self.char
                if not self.char:
                    raise NotACallError
                yield
            yield from self.expect("<")
            if self.char == "/":
                yield from self.expect(f"/{name}>")
                break
            key = yield from self.read_until(">")
            inner = _child(schema, key, tool)
            children.append((key, (yield from self._element(key, inner, tool, depth + 1))))
            text = ""
        types, keys = types_of(schema, tool), [key for key, _ in children]
        if keys and set(keys) == {_ITEM} and (types is None or "array" in types):
            return f"[{', '.join(value for _, value in children)}]"
        if keys:
            if len(set(keys)) < len(keys):
                raise NotACallError
            return f"{{{', '.join(f'{json.dumps(key)}: {value}' for key, value in children)}}}"
        text = text.removesuffix(_MARK)
        if isinstance(schema, Mapping) and schema.get("type") == "string":
            return json.dumps(text, ensure_ascii=False)
        if not text.strip():
            empty = {"array": "[]", "object": "{}"}
            text = next((empty[kind] for kind in types or () if kind in empty), text)
        return as_json(text, types)

    @classmethod
    def _parameters(cls, rules: Rules, schema: Mapping[str, Any]) -> str:
        parts, required = [], frozenset(schema.get("required", ()))
        for key in schema.get("properties", {}):
            part = cls._element_rule(rules, key, rules.property(schema, key))
            parts.append(part if key in required else f"({part})?")
        return " ".join(parts) or '""'

    @classmethod
    def _element_rule(cls, rules: Rules, name: str, schema: Mapping[str, Any]) -> str:
        """Returns a rule for an element. JSON enforces what elements cannot enforce."""
        begin, end = rules.literal(f"{_MARK}<{name}>"), f"{_MARK}</{name}>"
        kind, options = schema.get("type"), {"x-guidance": schema.get("x-guidance", {})}
        if kind == "string":
            return f"{begin} {rules.bare_string(schema, end)}"
        if not _is_plain(schema):
            return f"{begin} {rules.json(schema)} {rules.literal(end)}"
        if kind == "array":
            item = cls._element_rule(rules, _ITEM, {**schema["items"], **options})
            return f"{begin} ({item})* {rules.literal(end)}"
        properties = {key: {**value, **options} for key, value in schema["properties"].items()}
        inner = cls._parameters(rules, {**schema, "properties": properties})
        return f"{begin} {inner} {rules.literal(end)}"


def _child(schema: Any, name: str, tool: Mapping[str, Any]) -> Any:
    """Returns the schema of an element inside of another; {} if it is not known."""
    for _ in range(8):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            break
        schema = resolve(tool, unquote(reference))
    if not isinstance(schema, Mapping):
        return {}
    properties, items = schema.get("properties"), schema.get("items")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return items if name == _ITEM and isinstance(items, Mapping) else {}


def _is_plain(schema: Any) -> bool:
    """Tells whether elements can enforce all that a schema of an array or object says."""
    if not isinstance(schema, Mapping):
        return False
    keys = schema.keys() - {"x-guidance"}
    match schema.get("type"):
        case "array":
            return keys <= _PLAIN_ARRAY and _is_plain_child(schema.get("items"))
        case "object":
            properties = schema.get("properties")
            return (
                keys <= _PLAIN_OBJECT
                and isinstance(properties, Mapping)
                and bool(properties)
                and not schema.get("additionalProperties")
                and set(schema.get("required", ())) <= properties.keys()
                and all(_is_plain_child(value) for value in properties.values())
            )
    return False


def _is_plain_child(schema: Any) -> bool:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind in ("array", "object"):
        return _is_plain(schema)
    keywords = _PLAIN_STRING if kind == "string" else ANNOTATIONS | {"type", "enum", "const"}
    return isinstance(kind, str) and schema.keys() <= keywords
