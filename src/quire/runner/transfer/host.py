"""Host memory for KV blocks: as many slots for each KV group, each as large as a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.arrays import Int32
from quire.errors import ConfigError
from quire.runner.memory import available_memory
from quire.runner.transfer.layout import BlockLayout

_CHUNK_BYTES = 1 << 30
"""Pinned memory is taken in pieces of this size: one large one would be rounded up to a power of
two, and cost up to twice what was asked for."""


class HostPool:
    """`slots` places for each group's blocks; pinned where there is a GPU to copy from."""

    def __init__(self, layouts: Sequence[BlockLayout], slots: int, pinned: bool) -> None:
        self.slots = slots
        self._groups = [_Slots(layout.size, slots, pinned) for layout in layouts]

    @staticmethod
    def slots_within(layouts: Sequence[BlockLayout], limit: int, ranks: int = 1) -> int:
        """Returns how many slots of each group fit a rank's share of `limit` bytes.

        Raises:
            ConfigError: not a single one, or the machine has less memory than that.
        """
        free = available_memory()
        slots = limit // ranks // sum(layout.size for layout in layouts)
        if slots < 1:
            raise ConfigError("host_cache_gb has no room for a single KV block", "host_cache_gb")
        if limit > free:
            raise ConfigError(
                f"host_cache_gb={limit / 1e9:g} exceeds the {free / 1e9:.1f} GB of free memory",
                "host_cache_gb",
            )
        return slots

    def view(self, group: int, slot: int) -> memoryview:
        """A slot's bytes, writable."""
        return self._groups[group].view(slot)

    def addresses(self, group: int, slots: Int32) -> Any:
        """int64 [n]."""
        return self._groups[group].addresses(slots)

    def whole(self, group: int) -> Tensor:
        """uint8 [slots, bytes], where the pool is in one piece (it is not pinned)."""
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
