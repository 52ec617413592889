"""Normalization layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quire import ops
from quire.layers.pieces import Piece


class RMSNorm(nn.Module):
    """See `ops.rms_norm`. fusible: `ops.linear` can apply it to what it multiplies."""

    fusible = True

    def __init__(self, width: int, eps: float, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(
            torch.empty(width, device=device, dtype=dtype), requires_grad=False
        )

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def pieces(self) -> Iterator[Piece]:
        yield Piece("weight", self.weight.data, tuple(self.weight.shape), initial="ones")


class LayerNorm(RMSNorm):
    """See `ops.layer_norm`."""

    fusible = False

    def __init__(self, width: int, eps: float, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(width, eps, device=device, dtype=dtype)
        self.bias = nn.Parameter(
            torch.empty(width, device=device, dtype=dtype), requires_grad=False
        )

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def pieces(self) -> Iterator[Piece]:
        yield from super().pieces()
        yield Piece("bias", self.bias.data, tuple(self.bias.shape), initial="zeros")
