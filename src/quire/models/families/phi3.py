"""Phi-3 and Phi-4: Llama with fused projections, and positions extended by LongRoPE (Abdin et al.
2024)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from quire.models.families import fused, llama, settings
from quire.models.families.family import Family
from quire.models.spec import ModelSpec


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    base = llama.base_spec({"rms_norm_eps": 1e-5, **config}, "phi3")
    explicit = config.get("sliding_window") is not None
    width = settings.integer(config, "sliding_window") if explicit else None
    return llama.with_layers(base, {}, windows=[width] * len(base.layers))


FAMILY = Family(
    name="phi3",
    spec=_spec,
    source=functools.partial(fused.source, fused=("self_attn.qkv_proj", "mlp.gate_up_proj")),
    ignored=llama.IGNORED,
    implements=("partial_rotary_factor",),
)
