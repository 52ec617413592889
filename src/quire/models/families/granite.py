"""Granite 3 and 4 dense: Llama with multipliers for embeddings, scores, layers and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.models.families import llama, settings
from quire.models.families.family import Family
from quire.models.spec import ModelSpec


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    base = llama.base_spec(config, "granite")
    bias = settings.flag(config, "attention_bias", False)
    mixer = {
        "scale": settings.number(config, "attention_multiplier", 1.0),
        "qkv_bias": bias,
        "out_bias": bias,
    }
    ffn = {"bias": settings.flag(config, "mlp_bias", False)}
    multiplier = settings.number(config, "residual_multiplier", 1.0)
    return replace(
        llama.with_layers(base, mixer, ffn, multiplier=multiplier),
        embedding_scale=settings.number(config, "embedding_multiplier", 1.0),
        logit_scale=1.0 / settings.number(config, "logits_scaling", 1.0),
    )


FAMILY = Family(
    name="granite",
    spec=_spec,
    source=llama.source,
    ignored=llama.IGNORED,
    implements=(
        "attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier",
    ),
)  # fmt: skip
