"""Qwen2 and Qwen2.5: Llama with biases on q, k and v (Yang et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ModelError
from quire.models.families import llama, settings
from quire.models.families.family import Family
from quire.models.spec import ModelSpec


def windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """The layers from `max_window_layers` on have a window, if windows are used at all."""
    if not settings.flag(config, "use_sliding_window", False):
        return settings.windows(config, layers, None, first=layers)
    explicit_null = "sliding_window" in config and config["sliding_window"] is None
    width = None if explicit_null else settings.integer(config, "sliding_window", 4096)
    first = settings.integer(config, "max_window_layers", 28, low=0)
    return settings.windows(config, layers, width, first)


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    if settings.flag(config, "use_mrope", False):
        raise ModelError("config.json: use_mrope (multimodal rotary positions) is not supported")
    base = llama.base_spec(config, "qwen2")
    own = windows(config, len(base.layers))
    return llama.with_layers(base, {"qkv_bias": True}, windows=own)


FAMILY = Family(
    name="qwen2",
    spec=_spec,
    source=llama.source,
    ignored=llama.IGNORED,
    implements=("layer_types",),
)
