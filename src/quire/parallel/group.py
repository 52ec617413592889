"""The ranks that share a model's layers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

AllReduceNorm = Callable[[Tensor, Tensor, Tensor, float, str], tuple[Tensor, Tensor] | None]
"""Takes x, the residual, the weight and the epsilon of `ops.rms_norm`, and a name, see
`ProcessGroup.all_reduce`. Returns the sum and its norm; None: they are better computed apart."""


class ProcessGroup(Protocol):
    """`rank` of `world` ranks, which call the same collectives in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def halves_from(self) -> int:
        """The tokens from which a step is computed as two halves (`layers/async_tp.py`)."""
        ...

    @property
    def all_reduce_norm(self) -> AllReduceNorm | None:
        """Returns what `all_reduce` and an RMSNorm behind it may be left to under the current
        policy, or None."""
        ...

    def all_reduce(self, x: Tensor, residual: Tensor | None = None, name: str = "") -> Tensor:
        """The sum of every rank's `x`, and the residual, which all hold; may reuse the memory of
        `x`. name: what an error calls it."""
        ...

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Every rank's `x`, of equal shapes, one after the other along `dim` in rank order."""
        ...


class SingleGroup:
    """One rank alone: collectives cost nothing."""

    rank, world, halves_from, all_reduce_norm = 0, 1, sys.maxsize, None

    def all_reduce(self, x: Tensor, residual: Tensor | None = None, name: str = "") -> Tensor:
        return x if residual is None else x.add_(residual)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return x
