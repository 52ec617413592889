"""Qwen3.5: Qwen3-Next with dense feed-forward layers (Qwen Team 2026)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.models.families import qwen3_next, qwen_vision, rope
from quire.models.families.family import Family
from quire.models.spec import ModelSpec

IMPLEMENTS = (*qwen3_next.IMPLEMENTS, "mrope_section")


def in_sections(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """Returns the spec with the rotary positions of Qwen3.5."""
    pairs = 0 if (turns := spec.attention[0].rope) is None else turns.rotary_dim // 2
    default = [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3]
    return rope.in_sections(spec, config, default, woven=True)


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    return in_sections(qwen3_next.base_spec(config, "qwen3_5"), config)


FAMILY = Family(
    name="qwen3_5",
    spec=_spec,
    source=qwen3_next.stacked_source,
    prefixes=qwen3_next.PREFIXES,
    ignored=qwen3_next.IGNORED,
    implements=IMPLEMENTS,
    vision=qwen_vision.QWEN3,
)
