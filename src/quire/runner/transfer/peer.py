"""The place `peer`: host memory through which KV blocks go to other engines and come from them.

Slots hold the heads of all ranks, and all ranks map the memory: each copies its own heads, so what
lies there does not depend on the number of ranks. What goes over the wire is the first rank's work.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from quire.runner.mask_ring import pin
from quire.runner.transfer.copier import Copier, HostCopier, PinnedCopier
from quire.runner.transfer.layout import BlockLayout, HeadRange, head_range

_BYTES = 256 << 20
"""Bytes of the memory, unless a few blocks need more."""
_LEAST_SLOTS, _MOST_SLOTS = 8, 4096
_BOARD = 64
"""The beginning of the board, behind the token."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Memory of one process that others on its host can map.

    descriptor: of the process `pid`. token: its first bytes, by which it is known to be the one
    that was meant: with containers, process ids may name others.
    """

    pid: int
    descriptor: int
    size: int
    token: bytes

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.descriptor}"


class StagingPool:
    """Slots for the blocks of each group, in memory that processes of this host can map.

    sizes: bytes of a slot, by group. handle: for other processes. board: int64 [ranks, 2], how many
    moves in and out of the memory each rank has ended.
    """

    def __init__(self, sizes: Sequence[int], slots: int, group: ProcessGroup, device: str) -> None:
        self.sizes = tuple(sizes)
        self.slots = slots
        head = -(-(_BOARD + 16 * group.world) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._starts = [head + sum(sizes[:g]) * slots for g in range(len(sizes))]
        size = head + sum(sizes) * slots
        self.handle = self._make(size) if group.rank == 0 else None
        named = (0, 0) if self.handle is None else (self.handle.pid, self.handle.descriptor)
        if group.world > 1:
            told = torch.tensor([named], dtype=torch.int32, device=device)
            named = tuple(group.all_gather(told, 0)[0].tolist())
        descriptor = named[1] if self.handle is not None else _open(*named)
        self._memory = mmap.mmap(descriptor, size)
        if self.handle is None:
            os.close(descriptor)
        else:
            self._memory[: len(self.handle.token)] = self.handle.token
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8)
        self.board = self._bytes[_BOARD : _BOARD + 16 * group.world].view(np.int64).reshape(-1, 2)
        self.rank = group.rank
        if device.startswith("cuda"):
            pin(self._bytes.view(np.int8))

    @staticmethod
    def _make(size: int) -> SharedMemory:
        descriptor = os.memfd_create("quire-kv")
        os.ftruncate(descriptor, size)
        return SharedMemory(os.getpid(), descriptor, size, secrets.token_bytes(16))

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


def _at_once() -> bool:
    return True


def _open(pid: int, descriptor: int) -> int:
    return os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


class PeerPlace:
    """Moves blocks to and from a staging pool. A move has ended when it has on all ranks.

    owns: by group, whether this rank writes its heads to the pool; of ranks with copies of the
    same, one does.
    """

    def __init__(self, pool: StagingPool, copier: Copier, owns: Sequence[bool]) -> None:
        self.pool = pool
        self._owns = owns
        self._copier = copier
        self._begun = [0, 0]
        self._own: tuple[deque[tuple[int, Callable[[], bool]]], ...] = deque(), deque()
        """By direction, moves that have not ended here: their numbers."""
        self._all: tuple[deque[tuple[int, int]], ...] = deque(), deque()
        """By direction, moves that have not ended everywhere: numbers and ids."""

    def out(self, transfer: Transfer) -> None:
        self._begin(0, transfer, self._copier.out)

    def into(self, transfer: Transfer) -> None:
        self._begin(1, transfer, self._copier.into)

    def _begin(
        self,
        direction: int,
        transfer: Transfer,
        move: Callable[[int, Int32, Int32], Callable[[], bool]],
    ) -> None:
        self._begun[direction] += 1
        done = _at_once
        if direction == 1 or self._owns[transfer.group]:
            done = move(transfer.group, transfer.blocks, transfer.slots)
        self._own[direction].append((self._begun[direction], done))
        self._all[direction].append((self._begun[direction], transfer.id))

    def ended(self) -> tuple[list[int], list[int]]:
        finished: list[int] = []
        board = self.pool.board
        for direction, (own, everywhere) in enumerate(zip(self._own, self._all, strict=True)):
            while own and own[0][1]():
                board[self.pool.rank, direction] = own.popleft()[0]
            ended = int(board[:, direction].min()) if everywhere else 0
            while everywhere and everywhere[0][0] <= ended:
                finished.append(everywhere.popleft()[1])
        return finished, []

    @property
    def busy(self) -> bool:
        return any(self._all)

    def close(self) -> None:
        while any(self._own):
            self.ended()
        self.pool.close()


def open_peer_place(
    cache: KVCache, spec: ModelSpec, group: ProcessGroup, device: torch.device
) -> PeerPlace:
    """Makes the memory, of one rank or of several, which all call this at once.

    Raises:
        ConfigError: blocks cannot be cut into heads, or cannot be copied.
    """
    layouts = [
        BlockLayout(cache.block_tensors(index), _heads(cache, index, spec, group))
        for index in range(len(cache.groups))
    ]
    sizes = [layout.size for layout in layouts]
    slots = max(_LEAST_SLOTS, min(_MOST_SLOTS, _BYTES // sum(sizes)))
    pool = StagingPool(sizes, slots, group, str(device))
    copier: Copier = HostCopier(layouts, pool)
    if device.type == "cuda":
        copier = PinnedCopier(layouts, pool, device)
    owns = [group.rank == 0 if layout.heads is None else layout.heads.owner for layout in layouts]
    return PeerPlace(pool, copier, owns)


def _heads(cache: KVCache, index: int, spec: ModelSpec, group: ProcessGroup) -> HeadRange | None:
    """Returns the heads of a KV group that this rank holds; None: all that there is."""
    layer = cache.groups[index].layers[0]
    if group.world == 1 or layer >= len(spec.layers):
        return None
    if cache.groups[index].kind == "state":
        raise ConfigError(
            "role: recurrent states of several ranks do not travel; use tensor_parallel_size=1",
            "role",
        )
    mixer = spec.layers[layer].mixer
    if not isinstance(mixer, AttentionSpec):
        return None  # latents, of which every rank has all
    return head_range(mixer.kv_heads, group.rank, group.world)
