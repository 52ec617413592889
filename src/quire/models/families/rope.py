"""Rotary positions as config.json describes them."""

from __future__ import annotations

from collections.abc import Mapping

from quire.errors import ModelError
from quire.layers.rope_spec import LinearScaling, RopeSpec, YarnScaling
from quire.models.families import settings


def rope_spec(config: settings.Config, head_dim: int, max_positions: int) -> RopeSpec:
    """Reads `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` before it."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ModelError(f"config.json: rope settings must be an object, got {scaling!r}")
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise ModelError("config.json: rope settings that differ between layers are not supported")
    given = {**config, **{name: value for name, value in scaling.items() if value is not None}}
    theta = settings.number(given, "rope_theta", 10000.0)
    share = settings.number(given, "partial_rotary_factor", 1.0)
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ModelError(f"config.json: cannot rotate {rotary_dim} of {head_dim} dimensions")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return RopeSpec(theta, rotary_dim)
    # Most models have no scaling.
    from quire.models.families.rope_scaling import read_scaling

    read = read_scaling(str(kind), scaling, config, max_positions, rotary_dim)
    return RopeSpec(theta, rotary_dim, read)


def max_positions(spec: RopeSpec | None, trained: int) -> int:
    """Returns the longest sequence: `trained`, extended where a scaling says by how much."""
    scaling = None if spec is None else spec.scaling
    if isinstance(scaling, LinearScaling):
        return int(trained * scaling.factor)
    if isinstance(scaling, YarnScaling):
        return max(trained, int(scaling.original_max_positions * scaling.factor))
    return trained
