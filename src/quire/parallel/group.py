"""The ranks that share a model's layers."""

from __future__ import annotations

import sys
from typing import Protocol

from torch import Tensor


class ProcessGroup(Protocol):
    """`rank` of `world` ranks, which call the same collectives in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def halves_from(self) -> int:
        """The tokens from which a step is computed as two halves (`models/halves.py`)."""
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

    rank, world, halves_from = 0, 1, sys.maxsize

    def all_reduce(self, x: Tensor, residual: Tensor | None = None, name: str = "") -> Tensor:
        return x if residual is None else x.add_(residual)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return x
