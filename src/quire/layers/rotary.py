"""Rotary positions: the table of cosines and sines, with the context-extending scalings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.layers.rope_spec import FactorScaling, RopeSpec, YarnScaling


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
            if isinstance(spec.scaling, YarnScaling | FactorScaling):
                table *= spec.scaling.attention_factor
        self.register_buffer("cos_sin", table.to(device), persistent=False)
