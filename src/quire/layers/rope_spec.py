"""Rotary positions as data: the base, the dimensions that turn, and how positions are extended."""

from __future__ import annotations

from dataclasses import dataclass


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
