"""Qwen3, dense: Llama with norms on the heads of q and k (Yang et al. 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.models.families import llama, qwen2, settings
from quire.models.families.family import Family
from quire.models.spec import ModelSpec


def spec(config: Mapping[str, Any], family: str = "qwen3") -> ModelSpec:
    """Returns a dense Qwen3; related families change what differs."""
    # Unlike Llama's, the head size does not follow from the hidden size where it is not given.
    base = llama.base_spec({**config, "head_dim": config.get("head_dim") or 128}, family)
    bias = settings.flag(config, "attention_bias", False)
    mixer = {"qkv_bias": bias, "out_bias": bias, "qk_norm": base.norm}
    return llama.with_layers(base, mixer, windows=qwen2.windows(config, len(base.layers)))


FAMILY = Family(
    name="qwen3",
    spec=spec,
    source=llama.source,
    ignored=llama.IGNORED,
    implements=("layer_types",),
)
