"""Runs a parser over a text that is cut into pieces in all possible ways."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from quire.server.parsers.stream import CallArguments, CallBegin, CallEnd, Text, ToolParser

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["C", "F"]},
        },
        "required": ["city"],
    },
    "now": {"type": "object", "properties": {}},
}

Expected = list[str | tuple[str, Any]]
"""Texts, and calls as (name, arguments): JSON, or for calls that are not complete their text."""


def read(parser: type[ToolParser], pieces: Iterable[str]) -> Expected:
    instance = parser(TOOLS)
    parts = [part for piece in pieces for part in instance.feed(piece)] + instance.finish()
    out: Expected = []
    ended = True
    for part in parts:
        match part:
            case Text(text):
                if not out or not isinstance(out[-1], str):
                    out.append("")
                out[-1] += text  # type: ignore[operator]
                ended = True
            case CallBegin(id, name):
                assert id
                out.append((name, ""))
                ended = False
            case CallArguments(text):
                assert not ended
                name, before = out[-1]
                out[-1] = (name, before + text)
            case CallEnd():
                name, text = out[-1]
                out[-1] = (name, json.loads(text))
                ended = True
    return out


def cuts(text: str) -> Iterable[Sequence[str]]:
    yield [text]
    yield list(text)
    for size in (2, 3, 7):
        yield [text[i : i + size] for i in range(0, len(text), size)]
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]
