"""Gemma 2: norms before and after both parts of a layer, a window in every other layer, soft-capped
scores and logits (Gemma Team 2024)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.layers.norm import NormSpec
from quire.models.families import layer_types, llama, settings
from quire.models.families.family import Family
from quire.models.spec import ModelSpec

_STEMS = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh_and_mul"}
IMPLEMENTS = ("final_logit_softcapping", "layer_types", "query_pre_attn_scalar")
"""Keys that later generations support too. Their published code does not soft-cap scores."""

source = functools.partial(llama.source, stems=_STEMS)


def base_spec(config: Mapping[str, Any], family: str, windows: tuple[int | None, ...]) -> ModelSpec:
    """Returns the spec that all generations of Gemma share."""
    # Published code reads `hidden_activation`, and ignores `hidden_act` in the first releases.
    base = llama.base_spec({"tie_word_embeddings": True, **config, "hidden_act": None}, family)
    bias = settings.flag(config, "attention_bias", False)
    mixer = {
        "scale": settings.number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        "softcap": _cap(config, "attn_logit_softcapping"),
        "qkv_bias": bias,
        "out_bias": bias,
    }
    act = settings.choice(config, "hidden_activation", _ACTIVATIONS, "gelu_pytorch_tanh")
    layered = llama.with_layers(base, mixer, {"act": act}, windows, norms="both")
    return replace(
        layered,
        norm=NormSpec(kind="rms", eps=base.norm.eps, offset=1.0, wide=True),
        embedding_scale=base.hidden_size**0.5,
        logit_softcap=_cap(config, "final_logit_softcapping"),
    )


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    defaults = {"head_dim": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    config = {**defaults, **config}
    layers = settings.integer(config, "num_hidden_layers", high=settings.MOST_LAYERS)
    width = settings.integer(config, "sliding_window", 4096)
    return base_spec(config, "gemma2", layer_types.windows(config, layers, 2, width))


def _cap(config: Mapping[str, Any], name: str) -> float | None:
    return None if config.get(name) is None else settings.number(config, name)


FAMILY = Family(
    name="gemma2",
    spec=_spec,
    source=source,
    ignored=llama.IGNORED,
    implements=(*IMPLEMENTS, "attn_logit_softcapping"),
)
