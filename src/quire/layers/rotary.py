"""Rotary positions: settings, extended frequencies, and the table of angles."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Wavelengths beyond original_max / low_freq_factor are stretched by `factor`, those below
    original_max / high_freq_factor are kept, those between are blended (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Dimensions that turn often are kept, those that turn rarely are stretched, with a ramp
    between; cosines and sines are multiplied by `attention_factor` (Peng et al. 2023)."""

    factor: float
    original_max_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class FactorScaling:
    """The frequency of each pair divided by a factor of its own, [rotary_dim / 2] (LongRoPE, Ding
    et al. 2024); cosines and sines are multiplied by `attention_factor`."""

    factors: tuple[float, ...]
    attention_factor: float


Scaling = LinearScaling | Llama3Scaling | YarnScaling | FactorScaling


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """theta: the base of the geometric series of frequencies. rotary_dim: the first dimensions of
    a head that turn. interleaved: neighbours turn in pairs, rather than halves."""

    theta: float
    rotary_dim: int
    scaling: Scaling | None = None
    interleaved: bool = False


# Frequencies of rotary embeddings whose positions are extended.


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


# Rotary positions: the table of cosines and sines, with the context-extending scalings.


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """float32 [rotary_dim / 2], radians per position."""
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    periods = spec.theta**exponents
    if spec.scaling is None:
        return 1.0 / periods
    return scaled_frequencies(spec, spec.scaling, periods)


class RotaryTable(nn.Module):
    """float32 [positions, rotary_dim]: cosines of each pair's angle, then sines. Computed on the
    host, so that every device turns by the same angles."""

    cos_sin: Tensor

    def __init__(self, spec: RopeSpec, positions: int, *, device: torch.device) -> None:
        super().__init__()
        if device.type == "meta":
            table = torch.empty(positions, spec.rotary_dim, device=device)
        else:
            angles = torch.outer(
                torch.arange(positions, dtype=torch.float32), inverse_frequencies(spec)
            )
            table = torch.cat((angles.cos(), angles.sin()), dim=1)
            if isinstance(spec.scaling, YarnScaling | FactorScaling):
                table *= spec.scaling.attention_factor
        self.register_buffer("cos_sin", table.to(device), persistent=False)
