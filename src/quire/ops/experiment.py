"""Switches of one experiment. `QUIRE_STREAM` names the parts that are on; by default all are."""

from __future__ import annotations

import os

PARTS = frozenset({"early", "news", "results", "joined", "front", "tail"})
_ON = PARTS if (named := os.environ.get("QUIRE_STREAM")) is None else frozenset(named.split(","))


def on(part: str) -> bool:
    """Whether a part of the experiment is switched on."""
    if part not in PARTS:
        raise ValueError(part)
    return part in _ON
