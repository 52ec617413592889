"""Qwen3.5, the text model: Qwen3-Next with dense feed-forward layers (Qwen Team 2026)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.models.families import qwen3_next
from quire.models.families.family import Family
from quire.models.spec import ModelSpec

# A text token has the same position in all three sections of the rotation.
IMPLEMENTS = (*qwen3_next.IMPLEMENTS, "mrope_section")


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    return qwen3_next.base_spec(config, "qwen3_5")


FAMILY = Family(
    name="qwen3_5",
    spec=_spec,
    source=qwen3_next.stacked_source,
    prefixes=qwen3_next.PREFIXES,
    ignored=qwen3_next.IGNORED,
    implements=IMPLEMENTS,
)
