"""Host memory for KV blocks: slots for each KV group, each as large as a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from quire.arrays import Int32
from quire.errors import ConfigError
from quire.plan import Transfer
from quire.runner.memory import available_memory
from quire.runner.transfer.copier import Copier
from quire.runner.transfer.layout import BlockLayout
from quire.runner.transfer.rank_moves import INTO, OUT, Moves

_CHUNK_BYTES = 1 << 30
"""Pinned memory is allocated in pieces of this size. PyTorch rounds a piece up to a power of two,
so a large piece could take twice the bytes."""


class HostPool:
    """Slots for the blocks of each group, in memory that is pinned if there is a GPU."""

    def __init__(self, layouts: Sequence[BlockLayout], slots: Sequence[int], pinned: bool) -> None:
        self.slots = tuple(slots)
        self._groups = [
            _Slots(layout.size, count, pinned) for layout, count in zip(layouts, slots, strict=True)
        ]

    @staticmethod
    def slots_within(
        layouts: Sequence[BlockLayout], blocks: Sequence[int], limit: int, ranks: int = 1
    ) -> tuple[int, ...]:
        """Returns how many slots of each group fit a rank's memory, at least one each.

        The groups have slots in proportion to their blocks on the device.

        Args:
            blocks: number of blocks on the device, by group.
            limit: bytes of this rank.
            ranks: number of ranks on this machine.

        Raises:
            ConfigError: one slot of each group does not fit, or the machine has less memory than
                all ranks take.
        """
        free = available_memory()
        sizes = [layout.size for layout in layouts]
        each = sum(size * count for size, count in zip(sizes, blocks, strict=True))
        slots = tuple(max(1, count * limit // each) for count in blocks)
        if sum(size * count for size, count in zip(sizes, slots, strict=True)) > limit:
            kind = "KV block" if len(layouts) == 1 else "block of each kind"
            raise ConfigError(
                f"host_cache_gb={limit * ranks / 1e9:g} has no room for a single {kind}, which "
                f"takes {sum(sizes) * ranks / 1e9:g} GB on all ranks",
                "host_cache_gb",
            )
        if limit * ranks > free:
            raise ConfigError(
                f"host_cache_gb={limit * ranks / 1e9:g} exceeds the {free / 1e9:.1f} GB of free "
                "memory",
                "host_cache_gb",
            )
        return slots

    def view(self, group: int, slot: int) -> memoryview:
        """Returns a slot's bytes, writable."""
        return self._groups[group].view(slot)

    def addresses(self, group: int, slots: Int32) -> Any:
        """Returns the addresses of slots, int64 [n]."""
        return self._groups[group].addresses(slots)

    def whole(self, group: int) -> Tensor:
        """Returns all of a group's slots, uint8 [slots, bytes]. The pool must not be pinned."""
        return self._groups[group].chunks[0]


class _Slots:
    def __init__(self, size: int, slots: int, pinned: bool) -> None:
        self._size = size
        self._each = max(1, _CHUNK_BYTES // size) if pinned else slots
        counts = [min(self._each, slots - at) for at in range(0, slots, self._each)]
        try:
            self.chunks = [
                torch.empty((count, size), dtype=torch.uint8, pin_memory=pinned) for count in counts
            ]
        except RuntimeError as error:
            raise ConfigError(
                f"could not get {size * slots / 1e9:.1f} GB of "
                f"{'pinned ' if pinned else ''}host memory",
                "host_cache_gb",
            ) from error
        self._bases = np.array([chunk.data_ptr() for chunk in self.chunks], dtype=np.int64)

    def view(self, slot: int) -> memoryview:
        chunk, at = divmod(slot, self._each)
        return memoryview(self.chunks[chunk].numpy()[at])

    def addresses(self, slots: Int32) -> Any:
        chunk, at = np.divmod(slots.astype(np.int64), self._each)
        return self._bases[chunk] + at * self._size


# Places in the host's memory, to and from which a copier moves blocks.

Pool = TypeVar("Pool")


class PoolPlace(Generic[Pool]):
    """A pool of slots, to and from which each rank moves its heads of blocks.

    A move ends when all ranks have ended it.
    """

    def __init__(self, pool: Pool, copier: Copier, moves: Moves) -> None:
        self.pool = pool
        self.slots: tuple[int, ...] = ()
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

    def __init__(self, pool: HostPool, copier: Copier, moves: Moves) -> None:
        super().__init__(pool, copier, moves)
        self.slots = pool.slots
