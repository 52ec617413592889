"""GLM-4 dense: Llama that rotates half of each head, in neighbouring pairs. Models since 0414 have
norms before and after a layer's parts (Team GLM 2024)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.models.families import fused, llama, settings
from quire.models.families.family import Family
from quire.models.spec import ModelSpec

_FUSED = ("mlp.gate_up_proj",)
_STEMS = {
    "attention_out_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_mlp_layernorm",
}
_DEFAULTS = {"head_dim": 128, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7}


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    base = llama.base_spec({**_DEFAULTS, **config}, "glm4")
    rope = base.attention[0].rope
    assert rope is not None
    mixer = {
        "rope": replace(rope, interleaved=True),
        "qkv_bias": settings.flag(config, "attention_bias", True),
    }
    norms = "input" if base.architecture == "GlmForCausalLM" else "both"
    return llama.with_layers(base, mixer, norms=norms)


FAMILY = Family(
    name="glm4",
    spec=_spec,
    source=functools.partial(fused.source, fused=_FUSED, stems=_STEMS),
    ignored=llama.IGNORED,
    implements=("partial_rotary_factor",),
)
