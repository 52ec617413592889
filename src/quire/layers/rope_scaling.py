"""Frequencies of rotary embeddings whose positions are extended."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.layers.rope_spec import (
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    RopeSpec,
    Scaling,
    YarnScaling,
)


def scaled_frequencies(spec: RopeSpec, scaling: Scaling, periods: Tensor) -> Tensor:
    """Returns the radians per position of pairs that make one turn in 2 pi `periods`, both float32
    [rotary_dim / 2]."""
    if isinstance(scaling, LinearScaling):
        return 1.0 / periods / scaling.factor
    if isinstance(scaling, FactorScaling):
        return 1.0 / (torch.tensor(scaling.factors) * periods)
    if isinstance(scaling, Llama3Scaling):
        return _llama3(1.0 / periods, scaling)
    return _yarn(periods, spec, scaling)


def _llama3(base: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.original_max_positions * base / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * base / scaling.factor + keep * base


def _yarn(periods: Tensor, spec: RopeSpec, scaling: YarnScaling) -> Tensor:
    def pair(turns: float) -> float:
        """The (fractional) pair that makes `turns` turns over the original context."""
        wavelength = scaling.original_max_positions / (turns * 2 * math.pi)
        return spec.rotary_dim * math.log(wavelength) / (2 * math.log(spec.theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    pairs = torch.arange(len(periods), dtype=torch.float32)
    # A ramp of no width is a step; the small number only keeps it from dividing by zero.
    stretch = ((pairs - low) / ((high - low) or 0.001)).clamp(0.0, 1.0)
    return stretch / (scaling.factor * periods) + (1 - stretch) / periods
