"""Rotary positions: the table of cosines and sines, with the context-extending scalings."""

from __future__ import annotations

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


Scaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """theta: the base of the geometric series of frequencies. rotary_dim: the first dimensions of
    a head that turn."""

    theta: float
    rotary_dim: int
    scaling: Scaling | None = None


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """float32 [rotary_dim / 2], radians per position."""
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    periods = spec.theta**exponents
    if spec.scaling is None:
        return 1.0 / periods
    # Most models have no scaling.
    from quire.layers.rope_scaling import scaled_frequencies

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
            if isinstance(spec.scaling, YarnScaling):
                table *= spec.scaling.attention_factor
        self.register_buffer("cos_sin", table.to(device), persistent=False)
