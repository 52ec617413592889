"""Qwen3-VL with experts (Bai et al. 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.layers.expert_weights import Layout
from quire.models.families import (
    experts,
    known_values,
    qwen2_5_vl,
    qwen3_moe,
    qwen3_vl,
    qwen_vision,
    rope,
)
from quire.models.families.family import Family
from quire.models.spec import ModelSpec

_KNOWN: dict[str, tuple[Any, ...]] = {"norm_topk_prob": (True,)}
"""The published code renormalizes, whatever the key says."""


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    known_values.check(config, _KNOWN)
    given = {"rope_theta": 5e5, **config, "norm_topk_prob": True}
    # Programs that quantize write a tensor for each projection of each expert.
    layout: Layout = "transposed" if config.get("quantization_config") is None else "each"
    spec = qwen3_moe.spec(given, "qwen3_vl_moe", layout)
    return rope.in_sections(spec, config, qwen3_vl.SECTIONS, woven=True)


FAMILY = Family(
    name="qwen3_vl_moe",
    spec=_spec,
    source=experts.source(),
    prefixes=qwen2_5_vl.PREFIXES,
    ignored=qwen2_5_vl.IGNORED,
    implements=("layer_types", "mrope_section", "use_qk_norm", *experts.COUNTS),
    vision=qwen_vision.QWEN3,
)
