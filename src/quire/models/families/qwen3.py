"""Qwen3, dense: Llama with norms on the heads of q and k (Yang et al. 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.models.families import llama, qwen2, settings
from quire.models.families.family import Family
from quire.models.spec import ModelSpec


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    # Unlike Llama's, the head size does not follow from the hidden size where it is not given.
    base = llama.base_spec({**config, "head_dim": config.get("head_dim") or 128}, "qwen3")
    bias = settings.flag(config, "attention_bias", False)
    mixer = {"qkv_bias": bias, "out_bias": bias, "qk_norm": base.norm}
    return llama.with_layers(base, mixer, windows=qwen2.windows(config, len(base.layers)))


FAMILY = Family(
    name="qwen3",
    spec=_spec,
    source=llama.source,
    ignored=llama.IGNORED,
    implements=("layer_types",),
)
