"""Cohere 2 (Command R7B, Command A): attention and MLP in parallel, LayerNorm without bias, rotary
positions only in layers with a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.layers.norm import NormSpec
from quire.models.families import layer_types, llama, settings
from quire.models.families.family import Family
from quire.models.spec import ModelSpec


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    base = llama.base_spec({"tie_word_embeddings": True, **config, "head_dim": None}, "cohere2")
    explicit_null = "sliding_window" in config and config["sliding_window"] is None
    width = None if explicit_null else settings.integer(config, "sliding_window", 4096)
    windows = layer_types.windows(config, len(base.layers), 4, width)
    bias = settings.flag(config, "attention_bias", False)
    mixer = {"qkv_bias": bias, "out_bias": bias}
    spec = llama.with_layers(base, mixer, windows=windows, parallel=True)
    turns = base.attention[0].rope
    local = None if turns is None else replace(turns, interleaved=True)
    eps = settings.number(config, "layer_norm_eps", 1e-5)
    return replace(
        layer_types.with_ropes(spec, [None if window is None else local for window in windows]),
        norm=NormSpec(kind="layer", eps=eps, bias=False),
        logit_scale=settings.number(config, "logit_scale", 0.0625),
    )


FAMILY = Family(
    name="cohere2",
    spec=_spec,
    source=llama.source,
    ignored=llama.IGNORED,
    implements=("layer_types", "logit_scale", "sliding_window_pattern"),
)
