"""What a weight format has to say. Linear layers are built, sharded, stacked and loaded from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from quire import ops


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a format, for a layer of `out` outputs and `in` inputs.

    out_dim, in_dim: which of its axes runs over outputs and inputs; None where none does.
    out_per, in_per: outputs or inputs that one entry along the axis stands for (packed or grouped).
    """

    name: str
    dtype: torch.dtype
    out_dim: int | None = 0
    in_dim: int | None = 1
    out_per: int = 1
    in_per: int = 1

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        """The tensor's shape; (1,) where it has neither axis."""
        sizes = {}
        if self.out_dim is not None:
            sizes[self.out_dim] = -(-outputs // self.out_per)
        if self.in_dim is not None:
            sizes[self.in_dim] = -(-inputs // self.in_per)
        return tuple(sizes[axis] for axis in sorted(sizes)) or (1,)


class LinearMethod(Protocol):
    """A weight format as a strategy of `Linear`. Methods wrap each other: lora(quant(base))."""

    def stored(self, dtype: torch.dtype) -> Sequence[Stored]:
        """The tensors to keep for a layer that computes in `dtype`."""
        ...

    def apply(
        self,
        x: Tensor,
        layer: nn.Module,
        bias: Tensor | None,
        residual: Tensor | None,
        norm: ops.RmsScale | None,
        act: ops.Activation | None,
    ) -> Tensor:
        """act(norm(x) [T, in] times the weights, which are parameters of `layer` under their stored
        names, + bias [out]) + residual [T, out]. See `ops.linear`."""
        ...
