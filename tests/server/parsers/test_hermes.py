"""Hermes and Qwen: JSON between tags."""

from __future__ import annotations

import pytest

from quire.server.parsers.json_formats import HermesParser
from tests.server.parsers.harness import Expected, cuts, read

OSLO = '{"name": "weather", "arguments": {"city": "Oslo"}}'

CASES: list[tuple[str, Expected]] = [
    ("Hello.", ["Hello."]),
    ("", []),
    (" two  spaces \n", [" two  spaces \n"]),
    (f"<tool_call>\n{OSLO}\n</tool_call>", [("weather", {"city": "Oslo"})]),
    (f"<tool_call>{OSLO}</tool_call>\n", [("weather", {"city": "Oslo"})]),
    (
        f"I look it up.\n\n<tool_call>\n{OSLO}\n</tool_call>",
        ["I look it up.", ("weather", {"city": "Oslo"})],
    ),
    (
        f'<tool_call>\n{OSLO}\n</tool_call>\n<tool_call>\n{{"name": "now"}}\n</tool_call>',
        [("weather", {"city": "Oslo"}), ("now", {})],
    ),
    (
        '<tool_call>{"arguments": {"city": "Rome", "days": 2}, "name": "weather"}</tool_call> ok',
        [("weather", {"city": "Rome", "days": 2}), "ok"],
    ),
    (
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>',
        [("weather", {"city": "Rome"})],
    ),
    (
        '<tool_call>{"name": "now", "arguments": null, "id": 7}</tool_call>',
        [("now", {})],
    ),
    (
        '<tool_call>{"type": "function", "function": {"name": "now", "arguments": {}}}</tool_call>',
        [("now", {})],
    ),
    # Nested values, escapes, and a line break that JSON would want escaped.
    (
        '<tool_call>{"name": "weather", "arguments": {"city": "a\\"}</tool_call>\\u00e9\n😀", '
        '"x": [1, -2.5e3, {"y": [true, null]}]}}</tool_call>',
        [
            (
                "weather",
                {"city": 'a"}</tool_call>é\n😀', "x": [1, -2500.0, {"y": [True, None]}]},
            )
        ],
    ),
    # Parts that models forget or write twice.
    (f"<tool_call>{OSLO}", [("weather", {"city": "Oslo"})]),
    (f"<tool_call>{OSLO[:-1]}</tool_call>", [("weather", {"city": "Oslo"})]),
    (f"<tool_call>{OSLO}}}\n</tool_call>", [("weather", {"city": "Oslo"})]),
    # No calls: text as it was.
    ("<tool_call> is a tag", ["<tool_call> is a tag"]),
    ("1 <tool", ["1 <tool"]),
    ("a <tool_cat>", ["a <tool_cat>"]),
    (
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        ['<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'],
    ),
    ('<tool_call>{"arguments": {}}</tool_call>', ['<tool_call>{"arguments": {}}</tool_call>']),
    ('<tool_call>{"name": "now", "arguments": 3}', ['<tool_call>{"name": "now", "arguments": 3}']),
    ("<tool_call>{'name': 'now'}</tool_call>", ["<tool_call>{'name': 'now'}</tool_call>"]),
    (f"x <tool_call>\n<tool_call>{OSLO}", ["x <tool_call>", ("weather", {"city": "Oslo"})]),
    # Invalid after the call has begun: the call stays as it is, the rest is text.
    (
        '<tool_call>{"name": "weather", "arguments": {"city": Oslo}}</tool_call>',
        [("weather", '{"city": '), "Oslo}}</tool_call>"],
    ),
    ('<tool_call>{"name": "weather", "arguments": {"ci', [("weather", '{"ci')]),
    (f"<tool_call>{OSLO}<b>", [("weather", {"city": "Oslo"}), "<b>"]),
]


@pytest.mark.parametrize(("text", "want"), CASES)
def test_every_cut_gives_the_same(text: str, want: Expected) -> None:
    for pieces in cuts(text):
        assert read(HermesParser, pieces) == want, pieces
