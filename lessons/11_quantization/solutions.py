"""Solutions of the exercises on rounding."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(values: Tensor) -> Tensor:
    low, high = values[:, ::2], values[:, 1::2]
    return torch.bitwise_or(low, high << 4).to(torch.uint8)


def with_zero(x: Tensor, bits: int) -> Tensor:
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp(min=1e-12)
    found: Tensor = ((x - low) / step).round() * step + low
    return found


def smoothing(inputs: Tensor, weight: Tensor, strength: float) -> Tensor:
    columns = weight.abs().amax(0)
    factors = inputs**strength / columns ** (1 - strength)
    return torch.where((inputs > 0) & (columns > 0), factors, 1.0)
