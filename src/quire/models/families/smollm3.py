"""SmolLM3: Llama without rotary positions in every fourth layer (Bakouch et al. 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ModelError
from quire.models.families import layer_types, llama, settings
from quire.models.families.family import Family
from quire.models.spec import ModelSpec


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    defaults = {"tie_word_embeddings": True, "rope_theta": 2000000.0}
    base = llama.base_spec({**defaults, **config}, "smollm3")
    bias = settings.flag(config, "attention_bias", False)
    ffn = {"bias": settings.flag(config, "mlp_bias", False)}
    turned = _rotated_layers(config, len(base.layers))
    windows: tuple[int | None, ...] = (None,) * len(base.layers)
    if settings.flag(config, "use_sliding_window", False) and config.get("sliding_window"):
        width = settings.integer(config, "sliding_window")
        windows = tuple(None if turns else width for turns in turned)
        if config.get("layer_types") is not None:
            windows = settings.windows(config, len(base.layers), width, first=0)
    spec = llama.with_layers(base, {"qkv_bias": bias, "out_bias": bias}, ffn, windows)
    ropes = [m.rope if turns else None for m, turns in zip(spec.attention, turned, strict=True)]
    return layer_types.with_ropes(spec, ropes)


def _rotated_layers(config: Mapping[str, Any], layers: int) -> list[bool]:
    """Returns, for each layer, whether it has rotary positions."""
    listed = config.get("no_rope_layers")
    if listed is None:
        every = settings.integer(config, "no_rope_layer_interval", 4)
        return [(index + 1) % every != 0 for index in range(layers)]
    if not isinstance(listed, list) or len(listed) < layers or any(x not in (0, 1) for x in listed):
        raise ModelError(
            f"config.json: no_rope_layers must give each of {layers} layers 1 for rotary "
            "positions, or 0"
        )
    return [x == 1 for x in listed[:layers]]


FAMILY = Family(
    name="smollm3",
    spec=_spec,
    source=llama.source,
    ignored=llama.IGNORED,
    implements=("layer_types", "no_rope_layers", "no_rope_layer_interval"),
)
