"""Switches of one experiment. `QUIRE_STREAM` names the parts that are on; by default all are."""

from __future__ import annotations

import os

PARTS = frozenset({"early", "news", "results", "joined", "front", "tail"})
_on = PARTS


def use(parts: str) -> None:
    """Switches on the named parts, and no others."""
    global _on
    _on = frozenset(part for part in parts.split(",") if part)
    if not _on <= PARTS:
        raise ValueError(f"unknown parts: {_on - PARTS}")


def on(part: str) -> bool:
    """Whether a part is switched on."""
    return part in _on


if (_named := os.environ.get("QUIRE_STREAM")) is not None:
    use(_named)
