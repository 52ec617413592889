"""Qwen2 and Qwen2.5: Llama with biases on q, k and v (Yang et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ModelError
from quire.models.families import llama, qwen3, settings
from quire.models.families.family import Family
from quire.models.spec import ModelSpec


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    if settings.flag(config, "use_mrope", False):
        raise ModelError("config.json: use_mrope (multimodal rotary positions) is not supported")
    base = llama.base_spec(config, "qwen2")
    own = qwen3.windows(config, len(base.layers))
    return llama.with_layers(base, {"qkv_bias": True}, windows=own)


FAMILY = Family(
    name="qwen2",
    spec=_spec,
    source=llama.source,
    ignored=llama.IGNORED,
    implements=("layer_types",),
)
