"""Reads rotary positions and their scalings from config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from quire.errors import ModelError
from quire.layers.rotary import (
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    RopeSpec,
    Scaling,
    YarnScaling,
)
from quire.models.families import settings
from quire.models.spec import ModelSpec

_MOST_FACTOR = 1 << 16


def read_scaling(
    kind: str,
    scaling: Mapping[str, Any],
    config: Mapping[str, Any],
    max_positions: int,
    rotary_dim: int,
) -> Scaling:
    """Returns the scaling that an object in config.json describes.

    Raises:
        ModelError: the kind is not supported, or a value is invalid.
    """
    if kind == "linear":
        return LinearScaling(_factor(scaling))
    if kind == "llama3":
        return Llama3Scaling(
            settings.number(scaling, "factor"),
            settings.number(scaling, "low_freq_factor"),
            settings.number(scaling, "high_freq_factor"),
            settings.integer(scaling, "original_max_position_embeddings", max_positions),
        )
    if kind == "yarn":
        return _yarn(scaling, config, max_positions)
    # "su" was the first name of LongRoPE.
    if kind in ("longrope", "su"):
        return _longrope(scaling, config, max_positions, rotary_dim // 2)
    raise ModelError(
        f"config.json: rope type {kind!r} is not supported; expected one of: default, linear, "
        "llama3, longrope, yarn"
    )


def _factor(scaling: Mapping[str, Any], default: float | None = None) -> float:
    """Returns the factor by which the context is extended."""
    factor = settings.number(scaling, "factor", default)
    if factor > _MOST_FACTOR:
        raise ModelError(f"config.json: factor must be at most {_MOST_FACTOR}, got {factor:g}")
    return factor


def _original(scaling: Mapping[str, Any], config: Mapping[str, Any], max_positions: int) -> int:
    """Returns the model's context before its extension, in tokens."""
    name = "original_max_position_embeddings"
    return settings.integer({name: scaling.get(name) or config.get(name)}, name, max_positions)


def _longrope(
    scaling: Mapping[str, Any], config: Mapping[str, Any], max_positions: int, pairs: int
) -> FactorScaling:
    """Returns LongRoPE's factors, those for long sequences if the context was extended.

    All sequences use the same factors. Keys stay in the cache while a sequence grows, and
    sequences share prefixes, so factors cannot change with the length.
    """
    for name in ("short_mscale", "long_mscale"):
        if scaling.get(name) is not None:
            raise ModelError(f"config.json: {name} is not supported")
    original = _original(scaling, config, max_positions)
    # In Phi's configs the key is outside of the object and takes precedence.
    original = settings.integer(config, "original_max_position_embeddings", original)
    name = "long_factor" if max_positions > original else "short_factor"
    factors = scaling.get(name)
    if not isinstance(factors, list) or len(factors) != pairs:
        raise ModelError(f"config.json: {name} must be {pairs} numbers")
    factor = settings.number(scaling, "factor", max_positions / original)
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return FactorScaling(
        tuple(settings.number({name: each}, name) for each in factors),
        settings.number(scaling, "attention_factor", default),
    )


def _yarn(scaling: Mapping[str, Any], config: Mapping[str, Any], max_positions: int) -> YarnScaling:
    original_max = _original(scaling, config, max_positions)
    factor = _factor(scaling, max_positions / original_max)
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


def temperature(factor: float, mscale: float) -> float:
    """Returns the number by which YaRN multiplies queries and keys.

    Args:
        factor: extension of the context.
        mscale: a key of config.json.
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_attention(scaling: Mapping[str, Any], factor: float) -> float:
    names = ("mscale", "mscale_all_dim")
    if not all(scaling.get(name) for name in names):
        return temperature(factor, 1.0)
    mscale, mscale_all = (settings.number(scaling, name) for name in names)
    return temperature(factor, mscale) / temperature(factor, mscale_all)


def rope_spec(config: settings.Config, head_dim: int, max_positions: int) -> RopeSpec:
    """Returns the rotation that config.json describes: in `rope_parameters` (transformers 5), or in
    `rope_theta` and `rope_scaling`.

    Args:
        config: the model's config.json.
        head_dim: dimensions of a head.
        max_positions: tokens of the longest sequence.

    Raises:
        ModelError: a value is invalid or not supported.
    """
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
    # Early Qwen2.5-VL configs name the sections here, which is no scaling.
    if kind in ("default", "mrope"):
        return RopeSpec(theta, rotary_dim)
    read = read_scaling(str(kind), scaling, config, max_positions, rotary_dim)
    return RopeSpec(theta, rotary_dim, read)


def in_sections(
    spec: ModelSpec, config: settings.Config, default: list[int], *, woven: bool
) -> ModelSpec:
    """Returns the spec with rotations by three positions: time, row and column.

    Args:
        spec: the model.
        config: its config.json; `mrope_section` says how many pairs each position turns.
        default: `mrope_section` of configs without that key.
        woven: whether the three positions take turns. Otherwise each has neighbouring pairs.

    Raises:
        ModelError: `mrope_section` does not fit the rotation.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    sizes = scaling.get("mrope_section") or default
    layers = []
    for layer in spec.layers:
        turns: RopeSpec | None = getattr(layer.mixer, "rope", None)
        if turns is None:
            layers.append(layer)
            continue
        pairs = turns.rotary_dim // 2
        if not _are_sections(sizes, pairs):
            raise ModelError(
                f"config.json: mrope_section must be three numbers whose sum is {pairs}, got "
                f"{sizes!r}"
            )
        parts = [part for part, size in enumerate(sizes) for _ in range(size)]
        if woven:
            parts = [0] * pairs
            for part in (1, 2):
                for pair in range(part, min(3 * sizes[part], pairs), 3):
                    parts[pair] = part
        mixer = replace(cast(Any, layer.mixer), rope=replace(turns, sections=tuple(parts)))
        layers.append(replace(layer, mixer=mixer))
    return replace(spec, layers=tuple(layers))


def _are_sections(sizes: Any, pairs: int) -> bool:
    fine = isinstance(sizes, list) and len(sizes) == 3
    return fine and all(type(size) is int and size >= 0 for size in sizes) and sum(sizes) == pairs


def max_positions(spec: RopeSpec | None, trained: int) -> int:
    """Returns the tokens of the longest sequence: `trained`, or more if a scaling extends it."""
    scaling = None if spec is None else spec.scaling
    if isinstance(scaling, LinearScaling):
        return int(trained * scaling.factor)
    if isinstance(scaling, YarnScaling):
        return max(trained, int(scaling.original_max_positions * scaling.factor))
    return trained
