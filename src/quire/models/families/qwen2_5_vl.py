"""Qwen2.5-VL: Qwen2.5 with rotary positions in three sections, and a windowed vision tower (Bai et
al. 2025)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quire.models.families import llama, qwen3, qwen_vision, rope
from quire.models.families.family import Family
from quire.models.spec import ModelSpec

PREFIXES = {"model.language_model.": "model.", "language_model.model.": "model."}
IGNORED = re.compile(rf"^(model\.)?visual\.|{llama.IGNORED.pattern}")
"""Weights that the language model skips: those of the tower."""


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    base = llama.base_spec({"rope_theta": 1e6, **config}, "qwen2_5_vl")
    own = qwen3.windows(config, len(base.layers))
    spec = llama.with_layers(base, {"qkv_bias": True}, windows=own)
    return rope.in_sections(spec, config, [16, 24, 24], woven=False)


FAMILY = Family(
    name="qwen2_5_vl",
    spec=_spec,
    source=llama.source,
    prefixes=PREFIXES,
    ignored=IGNORED,
    implements=("layer_types", "mrope_section"),
    vision=qwen_vision.QWEN2,
)
