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

    Attributes:
        kind: RMSNorm (Zhang & Sennrich 2019) or LayerNorm (Ba et al. 2016).
        eps: epsilon.
        offset: added to the stored weights; 1.0 for models that store w and multiply by 1 + w.
        wide: the weight is fp32, and the norm rounds after the product with it instead of before.
        bias: whether a LayerNorm has a bias.
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
    """Applies `ops.rms_norm`.

    Attributes:
        scale: weight and epsilon, which an op may take to apply the norm itself; None if no op can.
        factor: multiplies the checkpoint's weights.
    """

    def __init__(self, width: int, spec: NormSpec, build: Build) -> None:
        super().__init__()
        self.eps = spec.eps
        self.offset = spec.offset
        self.factor = 1.0
        # In 16 bits, 1 + w would lose most digits of w. Kernels tell from the weight's dtype
        # whether to round before they multiply by it.
        self.weight = (replace(build, dtype=torch.float32) if spec.wide else build).empty(width)

    @property
    def scale(self) -> ops.RmsScale | None:
        return ops.RmsScale(self.weight, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def slices(self) -> Iterator[ParameterSlice]:
        initial: Literal["ones", "zeros"] = "zeros" if self.offset else "ones"
        yield ParameterSlice.for_tensor(
            "weight", self.weight.data, initial=initial, offset=self.offset, factor=self.factor
        )


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
            yield ParameterSlice.for_tensor("bias", self.bias.data, initial="zeros")
