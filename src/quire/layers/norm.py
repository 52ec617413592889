"""Normalization layers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from quire import ops
from quire.layers.build import Build
from quire.layers.parameter_slice import ParameterSlice


class RMSNorm(nn.Module):
    """Applies `ops.rms_norm`. scale: what `ops.linear` applies to its input instead, or None."""

    def __init__(self, width: int, eps: float, build: Build) -> None:
        super().__init__()
        self.eps = eps
        self.weight = build.empty(width)

    @property
    def scale(self) -> ops.RmsScale | None:
        return ops.RmsScale(self.weight, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def slices(self) -> Iterator[ParameterSlice]:
        yield ParameterSlice.of("weight", self.weight.data, initial="ones")


class LayerNorm(RMSNorm):
    """Applies `ops.layer_norm`."""

    def __init__(self, width: int, eps: float, build: Build) -> None:
        super().__init__(width, eps, build)
        self.bias = build.empty(width)

    @property
    def scale(self) -> ops.RmsScale | None:
        return None

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def slices(self) -> Iterator[ParameterSlice]:
        yield from super().slices()
        yield ParameterSlice.of("bias", self.bias.data, initial="zeros")
