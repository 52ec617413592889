"""Normalization layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from quire import ops
from quire.layers.build import Build
from quire.layers.parameter_slice import ParameterSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """A norm as data.

    offset: is added to the stored weights; models that store w for a factor of 1 + w have 1.
    wide: the weight is held in fp32 and applied before the result is rounded, rather than after.
    bias: whether a layer norm has one.
    """

    kind: Literal["rms", "layer"]
    eps: float
    offset: float = 0.0
    wide: bool = False
    bias: bool = True

    def layer(self, width: int, build: Build) -> RMSNorm:
        """Returns the norm, for vectors of this width."""
        return (RMSNorm if self.kind == "rms" else LayerNorm)(width, self, build)


class RMSNorm(nn.Module):
    """Applies `ops.rms_norm`. scale: what `ops.linear` applies to its input instead, or None."""

    def __init__(self, width: int, spec: NormSpec, build: Build) -> None:
        super().__init__()
        self.eps = spec.eps
        self.offset = spec.offset
        # In 16 bits, 1 + w would lose most digits of w. Kernels round where the weight's dtype asks
        # for it, so that they need not know of either.
        self.weight = (replace(build, dtype=torch.float32) if spec.wide else build).empty(width)

    @property
    def scale(self) -> ops.RmsScale | None:
        return ops.RmsScale(self.weight, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def slices(self) -> Iterator[ParameterSlice]:
        initial: Literal["ones", "zeros"] = "zeros" if self.offset else "ones"
        yield ParameterSlice.of("weight", self.weight.data, initial=initial, offset=self.offset)


class LayerNorm(RMSNorm):
    """Applies `ops.layer_norm`."""

    def __init__(self, width: int, spec: NormSpec, build: Build) -> None:
        super().__init__(width, spec, build)
        self.bias = build.empty(width) if spec.bias else None

    @property
    def scale(self) -> ops.RmsScale | None:
        return None

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def slices(self) -> Iterator[ParameterSlice]:
        yield from super().slices()
        if self.bias is not None:
            yield ParameterSlice.of("bias", self.bias.data, initial="zeros")
