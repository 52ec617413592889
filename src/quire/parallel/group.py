"""The ranks that share a model's layers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class ProcessGroup(Protocol):
    """`rank` of `world` ranks, which call the same collectives in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`; may reuse the memory of `x`."""
        ...

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Every rank's `x`, of equal shapes, one after the other along `dim` in rank order."""
        ...


class SingleGroup:
    """One rank alone: collectives cost nothing."""

    rank = 0
    world = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return x
