"""Qwen 3 Coder and 3.5: parameters between tags."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.server.parsers.qwen3_xml import Glm45Parser, Qwen3XmlParser
from quire.server.parsers.stream import CallArguments
from tests.server.parsers.harness import Expected, cuts, read

OSLO = "<parameter=city>\nOslo\n</parameter>"


def call(inner: str, name: str = "weather") -> str:
    return f"<tool_call>\n<function={name}>\n{inner}\n</function>\n</tool_call>"


CASES: list[tuple[str, Expected]] = [
    ("Hello <b>.", ["Hello <b>."]),
    (call(OSLO), [("weather", {"city": "Oslo"})]),
    (call("", "now"), [("now", {})]),
    ("<tool_call><function=now></function></tool_call>", [("now", {})]),
    (
        f"Sure.\n\n{call(OSLO)}\n{call('', 'now')}",
        ["Sure.", ("weather", {"city": "Oslo"}), ("now", {})],
    ),
    # Strings are taken literally. Other values are JSON if they parse as JSON.
    (
        call(
            '<parameter=city>\n a\n"<b>"\n\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
            "<parameter=flag>\nTrue\n</parameter>\n<parameter=list>\n[1, {}]\n</parameter>\n"
            "<parameter=other>\nas text\n</parameter>"
        ),
        [
            (
                "weather",
                {
                    "city": ' a\n"<b>"\n',
                    "days": 3,
                    "flag": True,
                    "list": [1, {}],
                    "other": "as text",
                },
            )
        ],
    ),
    (call("<parameter=city>7</parameter>"), [("weather", {"city": "7"})]),
    (call("<parameter=city>\n</paramete\n</parameter>"), [("weather", {"city": "</paramete"})]),
    (call(OSLO)[: -len("</tool_call>")], [("weather", {"city": "Oslo"})]),
    ("<tool_call> is a tag", ["<tool_call> is a tag"]),
    ("<tool_call><function=nobody>", []),
    (
        "<tool_call>\n<function=weather>\n<parameter=city>\nOs",
        [("weather", '{"city": "Os')],
    ),
    (
        f"<tool_call><function=weather>{OSLO}{OSLO}",
        [("weather", '{"city": "Oslo"'), OSLO],
    ),
    (f"{call(OSLO)} bye", [("weather", {"city": "Oslo"}), "bye"]),
]


@pytest.mark.parametrize(("text", "want"), CASES)
def test_every_cut_gives_the_same(text: str, want: Expected) -> None:
    for pieces in cuts(text):
        assert read(Qwen3XmlParser, pieces) == want, pieces


TEXT_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
MAY_BE_TEXT: list[tuple[Any, str, Any]] = [
    (TEXT_OR_NULL, "12345", "12345"),
    (TEXT_OR_NULL, "true", "true"),
    (TEXT_OR_NULL, "null", None),
    (TEXT_OR_NULL, '"12"', "12"),
    ({"type": ["string", "null"]}, "1e999", "1e999"),
    ({"$ref": "#/$defs/code"}, "007", "007"),
    ({"$ref": "#/$defs/code"}, "42", "42"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5", 5),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
    ({"anyOf": [{"type": "number"}, {"type": "string"}]}, "5", 5),
    ({}, "5", 5),
    # Python literals, if the schema does not allow a string.
    ({"type": "object"}, "{'a': [True, None]}", {"a": [True, None]}),
    ({"anyOf": [{"type": "array"}, {"type": "null"}]}, "['x']", ["x"]),
    ({"type": ["array", "string"]}, "['x']", "['x']"),
    ({"type": "array"}, "[f(x)]", "[f(x)]"),
    ({}, "['x']", "['x']"),
    # Schemas that are invalid.
    ({"$ref": "#/properties/value"}, "5", 5),
    ({"anyOf": [{"$ref": "#/properties/value"}] * 50}, "5", 5),
    ({"type": [["string"]]}, "5", 5),
    ({"$ref": "#/list/" + "9" * 5000}, "5", 5),
    (True, "5", 5),
]


@pytest.mark.parametrize(("schema", "text", "want"), MAY_BE_TEXT, ids=range(len(MAY_BE_TEXT)))
def test_a_value_that_may_be_a_string_only_is_one(schema: Any, text: str, want: Any) -> None:
    tool = {"properties": {"value": schema}, "$defs": {"code": {"type": "string"}}, "list": []}
    for write in (
        f"<tool_call>\n<function=f>\n<parameter=value>\n{text}\n</parameter>\n</function>",
        f"<tool_call>f\n<arg_key>value</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
    ):
        parser = (Qwen3XmlParser if "function" in write else Glm45Parser)({"f": tool})
        parts = parser.feed(write) + parser.finish()
        arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
        assert json.loads(arguments) == {"value": want}
