"""Mistral: a list behind a mark, or name and arguments."""

from __future__ import annotations

import pytest

from quire.server.parsers.json_formats import MistralParser
from tests.server.parsers.harness import Expected, cuts, read

OSLO = '{"name": "weather", "arguments": {"city": "Oslo"}}'

CASES: list[tuple[str, Expected]] = [
    ("Hello [INST].", ["Hello [INST]."]),
    (f"[TOOL_CALLS][{OSLO}]", [("weather", {"city": "Oslo"})]),
    (f"[TOOL_CALLS] [ {OSLO} ] ", [("weather", {"city": "Oslo"})]),
    (
        f'Sure. [TOOL_CALLS][{OSLO}, {{"name": "now", "arguments": {{}}, "id": "abcdefghi"}}]',
        ["Sure.", ("weather", {"city": "Oslo"}), ("now", {})],
    ),
    ('[TOOL_CALLS]weather{"city": "Oslo"}', [("weather", {"city": "Oslo"})]),
    ('[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}', [("weather", {"city": "Oslo"})]),
    (
        '[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Oslo"}[TOOL_CALLS]now[ARGS]{}',
        [("weather", {"city": "Oslo"}), ("now", {})],
    ),
    (f"[TOOL_CALLS][{OSLO}", [("weather", {"city": "Oslo"})]),
    ("[TOOL_CALLS]", []),
    ("[TOOL_CALLS][]", ["[TOOL_CALLS][]"]),
    ("[TOOL_CALLS]nobody{}", ["[TOOL_CALLS]nobody{}"]),
    ("[TOOL_CALLS]now[ARG]{}", ["[TOOL_CALLS]now[ARG]{}"]),
    ("[TOOL_CALLS]now{} bye", [("now", {}), "bye"]),
    (f"[TOOL_CALLS][{OSLO}, 3]", [("weather", {"city": "Oslo"}), ", 3]"]),
    ('[TOOL_CALLS]weather{"city": }', [("weather", '{"city": '), "}"]),
]


def test_ids_are_as_templates_want_them() -> None:
    id = MistralParser({}).new_id()
    assert len(id) == 9
    assert id.isalnum()


@pytest.mark.parametrize(("text", "want"), CASES)
def test_every_cut_gives_the_same(text: str, want: Expected) -> None:
    for pieces in cuts(text):
        assert read(MistralParser, pieces) == want, pieces
