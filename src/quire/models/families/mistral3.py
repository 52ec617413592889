"""Ministral 3, and the text model of Mistral Small 3.1 and later."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from quire.layers.attention_variants import QueryScaleSpec
from quire.models.families import llama, mistral, settings
from quire.models.families.family import Family
from quire.models.families.text_config import PREFIXES, VISION
from quire.models.spec import ModelSpec


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    if config.get("model_type") != "ministral3":
        return replace(mistral.FAMILY.spec(config), family="mistral3")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = llama.base_spec({"head_dim": 128, "rms_norm_eps": 1e-5, **config}, "mistral3")
    # `max_position_embeddings` already includes the scaling.
    base = replace(
        base,
        max_positions=settings.integer(
            config, "max_position_embeddings", high=settings.MOST_POSITIONS
        ),
    )
    windowed = config.get("sliding_window") is not None
    mixer = replace(
        base.attention[0],
        window=settings.integer(config, "sliding_window") if windowed else None,
    )
    if rope.get("llama_4_scaling_beta"):
        own = {field.name: getattr(mixer, field.name) for field in fields(mixer)}
        mixer = QueryScaleSpec(
            **own,
            beta=settings.number(rope, "llama_4_scaling_beta"),
            step=settings.integer(rope, "original_max_position_embeddings"),
        )
    return replace(base, layers=(replace(base.layers[0], mixer=mixer),) * len(base.layers))


FAMILY = Family(
    name="mistral3",
    spec=_spec,
    source=llama.source,
    prefixes=PREFIXES,
    ignored=re.compile(f"{VISION.pattern}|{llama.IGNORED.pattern}"),
    implements=("layer_types", "llama_4_scaling_beta"),
)
