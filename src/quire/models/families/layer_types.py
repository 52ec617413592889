"""Reads windows and rotary positions that differ between layers from config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from quire.layers.rotary import RopeSpec
from quire.models.families import settings
from quire.models.spec import ModelSpec


def windows(
    config: settings.Config, layers: int, every: int, width: int | None
) -> tuple[int | None, ...]:
    """Returns each layer's window.

    `layer_types` says which layers have a window. Without that key, all layers have the window
    `width`, except every `every`-th one.
    """
    if config.get("layer_types") is None and width is not None:
        every = settings.integer(config, "sliding_window_pattern", every)
        return tuple(width if index % every else None for index in range(1, layers + 1))
    return settings.windows(config, layers, width, first=layers)


def with_ropes(spec: ModelSpec, ropes: Sequence[RopeSpec | None]) -> ModelSpec:
    """Returns the spec with each layer's rotary positions."""
    return replace(
        spec,
        layers=tuple(
            replace(layer, mixer=replace(cast(Any, layer.mixer), rope=rope))
            for layer, rope in zip(spec.layers, ropes, strict=True)
        ),
    )


def rope_settings(
    config: settings.Config, local_theta: str | None, default: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the rope settings of layers without a window, and of layers with one.

    transformers 5 stores both in `rope_parameters`. In older configs, layers with a window have no
    scaling, and their base is under the key `local_theta`. Without that key, all layers use the
    same base.
    """
    given = config.get("rope_parameters")
    if isinstance(given, Mapping) and "full_attention" in given:
        return (
            {"rope_parameters": given["full_attention"] or {}},
            {"rope_parameters": given.get("sliding_attention") or {}, "rope_theta": default},
        )
    near = {"rope_parameters": None, "rope_scaling": None}
    if local_theta is None:
        return {}, near
    return {}, {**near, "rope_theta": settings.number(config, local_theta, default)}
