"""Qwen3-VL, dense: Qwen3 with woven rotary sections, a vision tower and DeepStack (Bai et al.
2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.models.families import llama, qwen2_5_vl, qwen3, qwen_vision, rope
from quire.models.families.family import Family
from quire.models.spec import ModelSpec

SECTIONS = [24, 20, 20]


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    spec = qwen3.spec({"rope_theta": 5e5, **config}, "qwen3_vl")
    return rope.in_sections(spec, config, SECTIONS, woven=True)


FAMILY = Family(
    name="qwen3_vl",
    spec=_spec,
    source=llama.source,
    prefixes=qwen2_5_vl.PREFIXES,
    ignored=qwen2_5_vl.IGNORED,
    implements=("layer_types", "mrope_section"),
    vision=qwen_vision.QWEN3,
)
