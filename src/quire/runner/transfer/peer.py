"""The place `peer`: host memory through which KV blocks go to other engines and come from them.

Slots hold the heads of all ranks, and all ranks map the memory: each copies its own heads, so what
lies there does not depend on the number of ranks. What goes over the wire is the first rank's work.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.arrays import Int32
from quire.errors import ConfigError
from quire.layers.attention import AttentionSpec
from quire.models import ModelSpec
from quire.parallel import ProcessGroup
from quire.plan import Transfer
from quire.runner.kv_cache import KVCache
from quire.runner.mask_ring import pin, unpin
from quire.runner.transfer.copier import Copier, HostCopier, PinnedCopier
from quire.runner.transfer.layout import BlockLayout, HeadRange, head_range
from quire.runner.transfer.moves import INTO, OUT, Moves, board_bytes, board_of
from quire.runner.transfer.shared_memory import map_shared

_CPU_BYTES, _GPU_BYTES = 256 << 20, 1 << 30
"""Bytes of the memory, unless a few blocks need more. Models on GPUs are larger."""
_LEAST_SLOTS, _MOST_SLOTS = 8, 4096


class StagingPool:
    """Slots for the blocks of each group, in memory that processes of this host can map.

    sizes: bytes of a slot, by group. handle: for other processes. board: see `Moves`.
    """

    def __init__(self, sizes: Sequence[int], slots: int, group: ProcessGroup, device: str) -> None:
        self.sizes = tuple(sizes)
        self.slots = slots
        head = -(-board_bytes(group.world) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._starts = [head + sum(sizes[:g]) * slots for g in range(len(sizes))]
        size = head + sum(sizes) * slots
        self._memory, self.handle = map_shared(size, group, device)
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8)
        self.board = board_of(self._bytes, group.world)
        self.rank = group.rank
        self._pinned = device.startswith("cuda")
        if self._pinned:
            pin(self._bytes.view(np.int8))

    def start(self, group: int, slot: int) -> int:
        """Returns where a slot begins in the memory, in bytes."""
        return self._starts[group] + slot * self.sizes[group]

    def view(self, group: int, slot: int) -> memoryview:
        begin = self.start(group, slot)
        return memoryview(self._memory)[begin : begin + self.sizes[group]]

    def addresses(self, group: int, slots: Int32) -> Any:
        base = self._bytes.ctypes.data + self._starts[group]
        return base + slots.astype(np.int64) * self.sizes[group]

    def whole(self, group: int) -> Tensor:
        begin, size = self._starts[group], self.slots * self.sizes[group]
        return torch.from_numpy(self._bytes[begin : begin + size].reshape(self.slots, -1))

    def close(self) -> None:
        """Lets others open it no more. Idempotent."""
        if self.handle is not None:
            os.close(self.handle.descriptor)
            self.handle = None
        if self._pinned:
            unpin(self._bytes.view(np.int8))
            self._pinned = False


def _at_once() -> bool:
    return True


class PeerPlace:
    """Moves blocks to and from a staging pool. A move has ended when it has on all ranks.

    owns: by group, whether this rank writes its heads to the pool; of ranks with copies of the
    same, one does.
    """

    def __init__(self, pool: StagingPool, copier: Copier, owns: Sequence[bool]) -> None:
        self.pool = pool
        self._owns = owns
        self._copier = copier
        self._moves = Moves(pool.board, pool.rank)

    def out(self, transfer: Transfer) -> None:
        done = _at_once
        if self._owns[transfer.group]:
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
        self.pool.close()


def open_peer_place(
    cache: KVCache, spec: ModelSpec, group: ProcessGroup, device: torch.device
) -> PeerPlace:
    """Makes the memory, of one rank or of several, which all call this at once.

    Raises:
        ConfigError: blocks cannot be cut into heads, or cannot be copied.
    """
    layouts = [
        BlockLayout(
            cache.block_tensors(index),
            rank_heads(cache, index, spec, group) if group.world > 1 else None,
        )
        for index in range(len(cache.groups))
    ]
    sizes = [layout.size for layout in layouts]
    size = _GPU_BYTES if device.type == "cuda" else _CPU_BYTES
    slots = max(_LEAST_SLOTS, min(_MOST_SLOTS, size // sum(sizes)))
    pool = StagingPool(sizes, slots, group, str(device))
    copier: Copier = HostCopier(layouts, pool)
    if device.type == "cuda":
        copier = PinnedCopier(layouts, pool, device)
    owns = [group.rank == 0 if layout.heads is None else layout.heads.owner for layout in layouts]
    return PeerPlace(pool, copier, owns)


def rank_heads(
    cache: KVCache, index: int, spec: ModelSpec, group: ProcessGroup
) -> HeadRange | None:
    """Returns the heads of a KV group that this rank holds; None: the blocks have none.

    Raises:
        ConfigError: several ranks have parts of a state that is not cut into heads.
    """
    layer = cache.groups[index].layers[0]
    if layer >= len(spec.layers):
        return None
    if cache.groups[index].kind == "state":
        if group.world == 1:
            return None
        raise ConfigError(
            "role: recurrent states of several ranks do not travel; use tensor_parallel_size=1",
            "role",
        )
    mixer = spec.layers[layer].mixer
    if not isinstance(mixer, AttentionSpec):
        return None  # latents, of which every rank has all
    return head_range(mixer.kv_heads, group.rank, group.world)
