"""Reads the scaling of rotary positions from a GGUF file."""

from __future__ import annotations

import math
from typing import Any

from quire.errors import ModelError
from quire.models.gguf.settings import Settings

_FACTORS = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
"""Tensors with divisors of rotary frequencies: Llama 3's, and LongRoPE's for long and short
sequences."""


def rope_scaling(settings: Settings) -> dict[str, Any] | None:
    """Returns the `rope_scaling` of config.json.

    Raises:
        ModelError: the kind is not supported, or a setting is invalid.
    """
    original = "rope.scaling.original_context_length"
    if _LONG in settings.tensors and _SHORT in settings.tensors:
        scaling: dict[str, Any] = {
            "rope_type": "longrope",
            "long_factor": settings.floats(_LONG),
            "short_factor": settings.floats(_SHORT),
            "original_max_position_embeddings": settings.integer(original),
        }
        if settings.get("rope.scaling.attn_factor"):
            scaling["attention_factor"] = settings.number("rope.scaling.attn_factor")
        return scaling
    if _FACTORS in settings.tensors:
        # There is one list of divisors, for sequences of any length.
        factors = settings.floats(_FACTORS)
        both = dict.fromkeys(("long_factor", "short_factor"), factors)
        return {"rope_type": "longrope", **both, "attention_factor": 1.0}
    factor = "rope.scaling.factor"
    if settings.get(factor) is None and settings.get("rope.scale_linear") is not None:
        factor = "rope.scale_linear"  # The first version of the format used this name.
    # In llama.cpp a factor without a type means linear scaling.
    usual = "none" if settings.get(factor) is None else "linear"
    name = settings.get("rope.scaling.type") or usual
    if name == "none":
        return None
    if name not in ("linear", "yarn"):
        raise ModelError(f"GGUF files with rope scaling {name!r} are not supported")
    scaling = {"rope_type": name, "factor": settings.number(factor)}
    if name == "linear":
        return scaling
    if settings.get(original) is not None:
        scaling["original_max_position_embeddings"] = settings.integer(original)
    for own, stored in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if settings.get(f"rope.scaling.{stored}") is not None:
            scaling[own] = settings.number(f"rope.scaling.{stored}")
    attention = settings.get("rope.scaling.attn_factor")
    if attention is not None and attention != 1.0:
        # llama.cpp multiplies this default, which follows from the factor, by the setting.
        usual_factor = 0.1 * math.log(scaling["factor"]) + 1.0
        scaling["attention_factor"] = settings.number("rope.scaling.attn_factor") * usual_factor
    return scaling
