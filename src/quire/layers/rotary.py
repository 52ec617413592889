"""Rotary position embeddings (Su et al. 2021), with the scalings that extend the context."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire import ops
from quire.layers.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023): positions are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """The scaling of Llama 3.1, by wavelength.

    Attributes:
        factor: multiplies wavelengths above original_max_positions / low_freq_factor.
        low_freq_factor: see `factor`.
        high_freq_factor: wavelengths below original_max_positions / high_freq_factor stay as they
            are. Wavelengths between the two limits are interpolated.
        original_max_positions: the context that the model was trained for.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al. 2023).

    Attributes:
        factor: multiplies the wavelengths of slow dimensions.
        original_max_positions: the context that the model was trained for.
        attention_factor: multiplies cosines and sines.
        beta_fast: dimensions with at least this many turns over that context stay as they are.
        beta_slow: dimensions with at most this many turns are slow. A linear ramp lies between
            fast and slow dimensions.
        truncate: both ends of the ramp are rounded to whole dimensions.
    """

    factor: float
    original_max_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class FactorScaling:
    """LongRoPE (Ding et al. 2024).

    Attributes:
        factors: [rotary_dim / 2], divisors of each pair's frequency.
        attention_factor: multiplies cosines and sines.
    """

    factors: tuple[float, ...]
    attention_factor: float


Scaling = LinearScaling | Llama3Scaling | YarnScaling | FactorScaling


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The rotation of a head's first dimensions.

    Attributes:
        theta: base of the geometric series of frequencies.
        rotary_dim: number of dimensions that are rotated.
        scaling: extension of the context, or None.
        interleaved: a pair is dimensions 2i and 2i + 1 instead of i and i + rotary_dim / 2.
        sections: which of three positions (time, row, column) turns each pair, or None if tokens
            have one position.
    """

    theta: float
    rotary_dim: int
    scaling: Scaling | None = None
    interleaved: bool = False
    sections: tuple[int, ...] | None = None


def scaled_frequencies(spec: RopeSpec, scaling: Scaling, periods: Tensor) -> Tensor:
    """Returns the pairs' scaled frequencies, float32 [rotary_dim / 2], in radians per position.

    Args:
        spec: the rotation.
        scaling: its scaling.
        periods: positions per radian without scaling, float32 [rotary_dim / 2].
    """
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
        """Returns the fractional index of the pair with `turns` turns over the context."""
        wavelength = scaling.original_max_positions / (turns * 2 * math.pi)
        return spec.rotary_dim * math.log(wavelength) / (2 * math.log(spec.theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    pairs = torch.arange(len(periods), dtype=torch.float32)
    # If both ends of the ramp coincide, 0.001 avoids a division by zero. The ramp is then a step.
    stretch = ((pairs - low) / ((high - low) or 0.001)).clamp(0.0, 1.0)
    return stretch / (scaling.factor * periods) + (1 - stretch) / periods


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """Returns the frequency of each pair, float32 [rotary_dim / 2], in radians per position."""
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    periods = spec.theta**exponents
    if spec.scaling is None:
        return 1.0 / periods
    return scaled_frequencies(spec, spec.scaling, periods)


class RotaryTable(nn.Module):
    """The cosines and sines of all positions.

    The host computes them, because then every device uses the same values.

    Attributes:
        cos_sin: float32 [positions, rotary_dim], the cosines of all pairs, then their sines.
        sections: int32 [rotary_dim / 2], see `RopeSpec`, or None.
    """

    cos_sin: Tensor
    sections: Tensor | None

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
        parts = spec.sections
        sections = None if parts is None else torch.tensor(parts, dtype=torch.int32, device=device)
        self.register_buffer("sections", sections, persistent=False)

    def prepare(self, batch: ForwardBatch) -> None:
        """Makes the table of a step whose tokens have three positions, for all layers."""
        if batch.rotary is not None and self.sections is not None:
            table = ops.section_rotary(self.cos_sin, batch.rotary, self.sections)
            rows = torch.arange(len(table), dtype=torch.int32, device=table.device)
            batch.angles[self] = table, rows

    def lookup(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Returns a table of cosines and sines, and each token's row in it, int32 [T]."""
        return batch.angles.get(self) or (self.cos_sin, batch.positions)

    def angles(self, batch: ForwardBatch) -> Tensor:
        """Returns the rotation of each token of a step, float32 [T, rotary_dim]: cosines, then
        sines. All layers share it."""
        if self not in batch.angles:
            table = self.cos_sin[batch.positions.long()]
            rows = torch.arange(len(table), dtype=torch.int32, device=table.device)
            batch.angles[self] = table, rows
        return batch.angles[self][0]
