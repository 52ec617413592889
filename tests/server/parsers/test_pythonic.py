"""Llama 3.2 and 4: calls in Python."""

from __future__ import annotations

import pytest

from quire.server.parsers.pythonic import PythonicParser
from tests.server.parsers.harness import Expected, cuts, read

CASES: list[tuple[str, Expected]] = [
    ("Hello [you].", ["Hello [you]."]),
    ("[now()]", [("now", {})]),
    ('[weather(city="Oslo")]', [("weather", {"city": "Oslo"})]),
    (
        "\n[ weather( city = 'O\\'Neill, [1]', days=-2, unit=None ), now( ) ]\n",
        [("weather", {"city": "O'Neill, [1]", "days": -2, "unit": None}), ("now", {})],
    ),
    (
        '[weather(city="é😀", x=[1, 2.5, {"a": (True, false, null)}],)]',
        [("weather", {"city": "é😀", "x": [1, 2.5, {"a": [True, False, None]}]})],
    ),
    ("<|python_start|>[now()]<|python_end|>", [("now", {})]),
    ("Let me see. <|python_start|>[now()]<|python_end|>", ["Let me see.", ("now", {})]),
    # Lists that are answers.
    ("[1, 2, 3]", ["[1, 2, 3]"]),
    ("[weather] is a word", ["[weather] is a word"]),
    ("[weather(city)]", ["[weather(city)]"]),
    ("[weather(city=Oslo)]", ["[weather(city=Oslo)]"]),
    ("[nobody(x=1)]", ["[nobody(x=1)]"]),
    ("[weather(city=open('x'))]", ["[weather(city=open('x'))]"]),
    ("[weather(1)]", ["[weather(1)]"]),
    ('[weather(city="Oslo', ['[weather(city="Oslo']),
    # Invalid after the call has begun.
    (
        '[weather(city="Oslo", days=two)]',
        [("weather", '{"city": "Oslo"'), ", days=two)]"],
    ),
    ('[weather(city="a", city="b")]', [("weather", '{"city": "a"'), ', city="b")]']),
    ("[now()] bye", [("now", {}), "bye"]),
    ("[now(), 3]", [("now", {}), ", 3]"]),
]


@pytest.mark.parametrize(("text", "want"), CASES)
def test_every_cut_gives_the_same(text: str, want: Expected) -> None:
    for pieces in cuts(text):
        assert read(PythonicParser, pieces) == want, pieces
