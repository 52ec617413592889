"""Qwen 3 Coder and 3.5: parameters between tags."""

from __future__ import annotations

import pytest

from quire.server.parsers.qwen3_xml import Qwen3XmlParser
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
    # Strings are taken as they are; other values are JSON where they can be.
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
