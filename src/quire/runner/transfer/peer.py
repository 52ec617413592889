"""The place `peer` in host memory, through which KV blocks are sent to and received from engines.

Slots hold the heads of all ranks, and all ranks map the memory. Each rank copies its own heads, so
the contents do not depend on the number of ranks. The first rank sends and receives over the
network.
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
from quire.layers.attention import AttentionSpec
from quire.layers.gated_delta import GatedDeltaSpec, StateLayout
from quire.layers.layout import MixerLayout
from quire.models.decoder import DecoderLayers
from quire.parallel import ProcessGroup
from quire.plan import Transfer
from quire.runner.host_inputs import pin, unpin
from quire.runner.kv_cache import KVCache
from quire.runner.transfer.copier import Copier, HostCopier, PinnedCopier
from quire.runner.transfer.host import PoolPlace
from quire.runner.transfer.layout import BlockLayout, HeadCut, HeadRange, head_range
from quire.runner.transfer.rank_moves import OUT, Moves, board_bytes, view_board
from quire.runner.transfer.shared_memory import map_shared

_CPU_BYTES, _GPU_BYTES = 256 << 20, 1 << 30
"""Bytes of the memory, unless a few blocks need more."""
_LEAST_SLOTS, _MOST_SLOTS = 8, 4096


class StagingPool:
    """Slots for the blocks of each group, in memory that processes of this host can map.

    Attributes:
        sizes: bytes of a slot, by group.
        handle: lets other processes map the memory.
        board: see `Moves`.
    """

    def __init__(self, sizes: Sequence[int], slots: int, group: ProcessGroup, device: str) -> None:
        self.sizes = tuple(sizes)
        self.slots = slots
        head = -(-board_bytes(group.world) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._starts = [head + sum(sizes[:g]) * slots for g in range(len(sizes))]
        size = head + sum(sizes) * slots
        self._memory, self.handle = map_shared(size, group, device)
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8)
        self.board = view_board(self._bytes, group.world)
        self.rank = group.rank
        self._pinned = device.startswith("cuda")
        if self._pinned:
            pin(self._bytes.view(np.int8))

    def start(self, group: int, slot: int) -> int:
        """Returns the offset of a slot in the memory, in bytes."""
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
        """Closes the memory's descriptor, so that no other process can map it. Idempotent."""
        if self.handle is not None:
            os.close(self.handle.descriptor)
            self.handle = None
        if self._pinned:
            unpin(self._bytes.view(np.int8))
            self._pinned = False


def _at_once() -> bool:
    return True


class PeerPlace(PoolPlace[StagingPool]):
    """Moves blocks to and from a staging pool, which all ranks share.

    Args:
        owns: by group, whether this rank writes its heads to the pool. Of the ranks with copies of
            the same heads, only one writes them.
    """

    def __init__(self, pool: StagingPool, copier: Copier, owns: Sequence[bool]) -> None:
        super().__init__(pool, copier, Moves(pool.board, pool.rank))
        self._owns = owns

    def out(self, transfer: Transfer) -> None:
        done = _at_once
        if self._owns[transfer.group]:
            done = self._copier.out(transfer.group, transfer.blocks, transfer.slots)
        self._moves.begin(OUT, transfer.id, done)

    def close(self) -> None:
        super().close()
        self.pool.close()


def open_peer_place(
    cache: KVCache, models: Sequence[DecoderLayers], group: ProcessGroup, device: torch.device
) -> PeerPlace:
    """Makes the memory. All ranks call it at the same time.

    Args:
        models: see `rank_heads`.

    Raises:
        ConfigError: blocks of this model cannot be copied.
    """
    layouts = [
        BlockLayout(cache.block_tensors(index), heads if group.world > 1 else None)
        for index, heads in enumerate(rank_heads(models, group))
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


def rank_heads(models: Sequence[DecoderLayers], group: ProcessGroup) -> list[HeadRange | None]:
    """Returns the heads of each KV group that this rank holds.

    None stands for all heads. Every rank has all heads of latent attention and of draft models.

    Args:
        models: the model, then draft models, in the order of their KV groups.
    """
    return [
        None if model.group is not group else _head_range(layout, model, group)
        for model in models
        for layout in model.kv_layouts
    ]


def _head_range(layout: MixerLayout, model: DecoderLayers, group: ProcessGroup) -> HeadRange | None:
    layers = zip(model.layers, model.spec.layers, strict=True)
    mixer = next(spec.mixer for block, spec in layers if block.attention.layout == layout)
    if isinstance(layout, StateLayout) and isinstance(mixer, GatedDeltaSpec):
        cuts = tuple(HeadCut(axis, sections) for axis, sections in layout.head_sections)
        return head_range(mixer.key_heads, group.rank, group.world, cuts)
    if isinstance(mixer, AttentionSpec):
        return head_range(mixer.kv_heads, group.rank, group.world)
    return None
