"""Weights in the dtype that the model computes in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from quire import ops
from quire.quantization.method import Stored


class Unquantized:
    def stored(self, dtype: torch.dtype) -> Sequence[Stored]:
        return (Stored("weight", dtype),)

    def apply(
        self,
        x: Tensor,
        layer: nn.Module,
        bias: Tensor | None,
        residual: Tensor | None,
        norm: ops.RmsScale | None,
        act: ops.Activation | None,
    ) -> Tensor:
        return ops.linear(x, cast(Tensor, layer.weight), bias, residual, norm, act)
