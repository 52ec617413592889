"""Places in the host's memory, to and from which a copier moves blocks."""

from __future__ import annotations

from typing import Generic, TypeVar

from quire.plan import Transfer
from quire.runner.transfer.copier import Copier
from quire.runner.transfer.host import HostPool
from quire.runner.transfer.moves import INTO, OUT, Moves

Pool = TypeVar("Pool")


class PoolPlace(Generic[Pool]):
    """A pool of slots for each rank's own heads of blocks. A move has ended when it has on all
    ranks."""

    def __init__(self, pool: Pool, copier: Copier, moves: Moves) -> None:
        self.pool = pool
        self._copier = copier
        self._moves = moves

    def out(self, transfer: Transfer) -> None:
        done = self._copier.out(transfer.group, transfer.blocks, transfer.slots)
        self._moves.begin(OUT, transfer.id, done)

    def into(self, transfer: Transfer) -> None:
        done = self._copier.into(transfer.group, transfer.blocks, transfer.slots)
        self._moves.begin(INTO, transfer.id, done)

    def ended(self) -> tuple[list[int], list[int]]:
        return self._moves.ended(), []

    @property
    def busy(self) -> bool:
        return self._moves.busy

    def close(self) -> None:
        self._moves.drain()


class HostPlace(PoolPlace[HostPool]):
    """The host's memory: each rank has a pool of its own."""
