"""Reading how a config.json extends the positions of rotary embeddings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quire.errors import ModelError
from quire.layers.rope_spec import LinearScaling, Llama3Scaling, Scaling, YarnScaling
from quire.models.families import settings


def read_scaling(
    kind: str, scaling: Mapping[str, Any], config: Mapping[str, Any], max_positions: int
) -> Scaling:
    """Returns the scaling of a kind that `scaling`, an object of `config`, describes.

    Raises:
        ModelError: the kind is unknown, or a value makes no sense.
    """
    if kind == "linear":
        return LinearScaling(settings.number(scaling, "factor"))
    if kind == "llama3":
        return Llama3Scaling(
            settings.number(scaling, "factor"),
            settings.number(scaling, "low_freq_factor"),
            settings.number(scaling, "high_freq_factor"),
            settings.integer(scaling, "original_max_position_embeddings", max_positions),
        )
    if kind == "yarn":
        return _yarn(scaling, config, max_positions)
    raise ModelError(
        f"config.json: rope type {kind!r} is not supported; known are: default, linear, llama3, "
        "yarn"
    )


def _yarn(scaling: Mapping[str, Any], config: Mapping[str, Any], max_positions: int) -> YarnScaling:
    original = scaling.get("original_max_position_embeddings") or config.get(
        "original_max_position_embeddings"
    )
    original_max = settings.integer({"original": original}, "original", max_positions)
    factor = settings.number(scaling, "factor", max_positions / original_max)
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = _yarn_attention(scaling, factor)
    return YarnScaling(
        factor=factor,
        original_max_positions=original_max,
        attention_factor=settings.number({"attention_factor": attention}, "attention_factor"),
        beta_fast=settings.number(scaling, "beta_fast", 32.0),
        beta_slow=settings.number(scaling, "beta_slow", 1.0),
        truncate=settings.flag(scaling, "truncate", True),
    )


def _yarn_attention(scaling: Mapping[str, Any], factor: float) -> float:
    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all:
        return temperature(mscale) / temperature(mscale_all)
    return temperature(1.0)
