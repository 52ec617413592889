"""Llama 3: bare JSON."""

from __future__ import annotations

import pytest

from quire.server.parsers.json_formats import Llama3JsonParser
from tests.server.parsers.harness import Expected, cuts, read

OSLO = '{"name": "weather", "parameters": {"city": "Oslo"}}'

CASES: list[tuple[str, Expected]] = [
    ("Hello {there}.", ["Hello {there}."]),
    (OSLO, [("weather", {"city": "Oslo"})]),
    (f"\n {OSLO}\n", [("weather", {"city": "Oslo"})]),
    (f"<|python_tag|>{OSLO}", [("weather", {"city": "Oslo"})]),
    (f"One moment. <|python_tag|> {OSLO}", ["One moment.", ("weather", {"city": "Oslo"})]),
    (
        f'{OSLO}; {{"name": "now", "arguments": {{}}}}',
        [("weather", {"city": "Oslo"}), ("now", {})],
    ),
    (
        '{"type": "function", "name": "now", "parameters": {}}',
        [("now", {})],
    ),
    ('{"function": "now", "parameters": {}}', [("now", {})]),
    # JSON that is an answer.
    ('{"name": "now"}', ['{"name": "now"}']),
    ('{"name": "Ann", "parameters": {}}', ['{"name": "Ann", "parameters": {}}']),
    ('{"city": "Oslo", "days": [1, 2]}', ['{"city": "Oslo", "days": [1, 2]}']),
    ("{ braces }", ["{ braces }"]),
    (f"In text: {OSLO}", ["In text:", ("weather", {"city": "Oslo"})]),
    ("<|python_tag|>print(1)", ["<|python_tag|>print(1)"]),
    (f"{OSLO} and more", [("weather", {"city": "Oslo"}), "and more"]),
    (f"{OSLO}; {{}}", [("weather", {"city": "Oslo"}), "; {}"]),
    ('{"name": "weather", "parameters": {"a": tru}}', [("weather", '{"a": tru'), "}}"]),
]


@pytest.mark.parametrize(("text", "want"), CASES)
def test_every_cut_gives_the_same(text: str, want: Expected) -> None:
    for pieces in cuts(text):
        assert read(Llama3JsonParser, pieces) == want, pieces
