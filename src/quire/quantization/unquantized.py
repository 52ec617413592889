"""Weights in the dtype that the model computes in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quire import ops
from quire.quantization.method import Stored


class Unquantized:
    def stored(self, dtype: torch.dtype) -> Sequence[Stored]:
        return (Stored("weight", dtype),)

    def apply(
        self,
        x: Tensor,
        weights: Mapping[str, Tensor],
        bias: Tensor | None,
        residual: Tensor | None,
    ) -> Tensor:
        return ops.linear(x, weights["weight"], bias, residual)
