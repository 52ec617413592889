"""Qwen3, dense: Llama with norms on the heads of q and k (Yang et al. 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.models.families import llama, settings
from quire.models.families.family import Family
from quire.models.spec import ModelSpec


def windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Returns each layer's window, as in Qwen2. With `use_sliding_window`, layers from
    `max_window_layers` on have one."""
    if not settings.flag(config, "use_sliding_window", False):
        return settings.windows(config, layers, None, first=layers)
    explicit_null = "sliding_window" in config and config["sliding_window"] is None
    width = None if explicit_null else settings.integer(config, "sliding_window", 4096)
    first = settings.integer(config, "max_window_layers", 28, low=0)
    return settings.windows(config, layers, width, first)


def spec(config: Mapping[str, Any], family: str = "qwen3") -> ModelSpec:
    """Returns a dense Qwen3, which related families modify."""
    # Without `head_dim` the head size is 128, unlike Llama's, which follows from the hidden size.
    base = llama.base_spec({**config, "head_dim": config.get("head_dim") or 128}, family)
    bias = settings.flag(config, "attention_bias", False)
    mixer = {"qkv_bias": bias, "out_bias": bias, "qk_norm": base.norm}
    return llama.with_layers(base, mixer, windows=windows(config, len(base.layers)))


FAMILY = Family(
    name="qwen3",
    spec=spec,
    source=llama.source,
    ignored=llama.IGNORED,
    implements=("layer_types",),
)
