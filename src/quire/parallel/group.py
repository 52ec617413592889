"""The ranks that share a model's layers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

AllReduceNorm = Callable[[Tensor, Tensor, Tensor, float, str], tuple[Tensor, Tensor] | None]
"""All-reduce, residual and RMSNorm in one kernel.

Takes x, the residual, the norm's weight and epsilon, and a name, see `ProcessGroup.all_reduce`.
Returns the sum and its norm, or None if separate kernels are faster for this x."""


class ProcessGroup(Protocol):
    """The ranks that share a model's layers. All call the same collectives in the same order.

    Attributes:
        rank: number of this rank, from 0.
        world: number of ranks.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def halves_from(self) -> int:
        """Steps of at least this many tokens are computed as two halves (`layers/async_tp.py`)."""
        ...

    @property
    def all_reduce_norm(self) -> AllReduceNorm | None:
        """Function that fuses `all_reduce` with the RMSNorm after it, or None if the group or the
        current policy does not fuse them."""
        ...

    def all_reduce(self, x: Tensor, residual: Tensor | None = None, name: str = "") -> Tensor:
        """Returns the sum of all ranks' `x`, plus the residual.

        Args:
            x: this rank's term. Its memory may be overwritten.
            residual: equal on all ranks, or None.
            name: name of the sum in error messages.
        """
        ...

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Returns all ranks' `x`, concatenated along `dim` in the order of ranks. The shape of `x`
        must be equal on all ranks."""
        ...


class SingleGroup:
    """A group of one rank. Its collectives do nothing."""

    rank, world, halves_from, all_reduce_norm = 0, 1, sys.maxsize, None

    def all_reduce(self, x: Tensor, residual: Tensor | None = None, name: str = "") -> Tensor:
        return x if residual is None else x.add_(residual)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return x
