"""Moves whole KV blocks between the device, the host's memory, and files.

**What goes out** is gathered on the step's own stream, before anything of the step is written, into
a staging buffer on the device (a fraction of a microsecond per block). From there it crosses the
host link on a stream of its own while the step computes. So blocks may be reused by the very step
that pushes them out: stream order alone protects them. Where a step pushes out more than the buffer
holds, its body waits for the first of it to have crossed.

**What comes in** crosses on another stream, which first waits for all that was launched before:
earlier steps may still use what lay there. No step waits for it. The brain is told when it has
arrived, and only then plans what reads it.

One copy call per block would reach a sixth of the link's rate, so kernels move all blocks of a
transfer at once, reading or writing the pinned memory themselves.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from quire.arrays import Int32, int32
from quire.config import EngineConfig
from quire.errors import ConfigError, QuireError
from quire.plan import Transfer
from quire.runner.gpu_memory import staging_bytes
from quire.runner.kv_cache import KVCache
from quire.runner.memory import GB
from quire.runner.transfer.disk import DiskStore, identity
from quire.runner.transfer.host import BlockLayout, HostPool
from quire.runner.transfer.threads import succeeded

_PATIENCE = 2e-3
"""Seconds for which a step without rows waits for something to arrive."""
_NAP = 5e-5


class Copier(Protocol):
    """Copies blocks between device and host. Both calls return at once, with a function that tells
    whether the copy is done."""

    def out(self, group: int, blocks: Int32, slots: Int32) -> Callable[[], bool]: ...

    def into(self, group: int, blocks: Int32, slots: Int32) -> Callable[[], bool]: ...


class KVTransfer:
    """Runs the transfers of plans.

    tensors: of each group, all that hold its blocks, with blocks as their first dimension.
    slots: of the host's pool, per group. staging: bytes on the device. disk: or None.
    """

    def __init__(
        self,
        tensors: Sequence[Sequence[Tensor]],
        slots: int,
        staging: int = 0,
        disk: DiskStore | None = None,
    ) -> None:
        layouts = [BlockLayout(group) for group in tensors]
        device = tensors[0][0].device
        self.pool = HostPool(layouts, slots, pinned=device.type == "cuda")
        self._copier: Copier = (
            CudaCopier(layouts, self.pool, staging, device)
            if device.type == "cuda"
            else HostCopier(layouts, self.pool)
        )
        self.disk = disk
        self._pending: deque[tuple[int, Callable[[], bool]]] = deque()
        self._files: dict[int, list[Future[bool]]] = {}

    @property
    def slots(self) -> int:
        """Blocks that the host's pool holds."""
        return self.pool.slots

    def start(self, transfers: Sequence[Transfer], direction: str) -> None:
        """Launches those of one direction."""
        for transfer in transfers:
            if transfer.direction != direction:
                continue
            if transfer.heads is not None:
                raise QuireError("transfers of some of the heads are not supported")
            if transfer.place == "host":
                move = self._copier.out if direction == "out" else self._copier.into
                done = move(transfer.group, transfer.blocks, transfer.slots)
                self._pending.append((transfer.id, done))
            elif transfer.place == "disk" and self.disk is not None:
                self._files[transfer.id] = self._file_jobs(self.disk, transfer)
            else:
                raise QuireError(f"there is no place {transfer.place!r} to move blocks to")

    def _file_jobs(self, disk: DiskStore, transfer: Transfer) -> list[Future[bool]]:
        move = disk.write if transfer.direction == "out" else disk.read
        return [
            move(key.tobytes(), transfer.group, self.pool.view(transfer.group, slot))
            for key, slot in zip(transfer.keys, transfer.slots.tolist(), strict=True)
        ]

    def ended(self, patient: bool) -> tuple[list[int], list[int]]:
        """(finished, failed) since the last call. patient: where there is none, wait a moment."""
        finished, failed = self._ended()
        deadline = time.monotonic() + _PATIENCE
        while patient and not finished and not failed and (self._pending or self._files):
            if time.monotonic() > deadline:
                break
            time.sleep(_NAP)
            finished, failed = self._ended()
        return finished, failed

    def _ended(self) -> tuple[list[int], list[int]]:
        finished = [id for id, done in self._pending if done()]
        if finished:
            gone = set(finished)
            self._pending = deque(entry for entry in self._pending if entry[0] not in gone)
        failed: list[int] = []
        stuck = bool(self._files) and self.disk is not None and self.disk.stuck
        for id, jobs in list(self._files.items()):
            if stuck or all(job.done() for job in jobs):
                del self._files[id]
                (finished if all(map(succeeded, jobs)) else failed).append(id)
        return finished, failed

    def disk_keys(self) -> Int32:
        """Returns the keys of the first group's blocks in files, least recently used first, int32
        [n, 4]."""
        return int32([]).reshape(0, 4) if self.disk is None else self.disk.keys(0)

    def close(self) -> None:
        """Waits for what is being copied. Idempotent."""
        if self.disk is not None:
            self.disk.close()
        self._files.clear()
        while self._pending:
            self._ended()


def open_transfer(
    config: EngineConfig, cache: KVCache, num_blocks: Sequence[int]
) -> KVTransfer | None:
    """Opens the places that the settings ask for; returns None without a host cache.

    Raises:
        ConfigError: the host's memory does not suffice, or the folder cannot be used.
    """
    args = config.args
    if not args.host_cache_gb:
        return None
    tensors = [cache.block_tensors(group) for group in range(len(num_blocks))]
    slots = HostPool.slots_within(
        [BlockLayout(group) for group in tensors], int(args.host_cache_gb * GB)
    )
    disk = None
    if args.disk_cache is not None:
        shapes = [[(tuple(t.shape[1:]), str(t.dtype)) for t in group] for group in tensors]
        seed = args.seed if args.load_format == "dummy" else None
        name = identity(Path(config.model_path), args.load_format, seed, config.dtype, shapes)
        disk = DiskStore(Path(args.disk_cache), int(args.disk_cache_gb * GB), name)
    staging = staging_bytes(config, cache.groups, sum(t.nbytes for group in tensors for t in group))
    return KVTransfer(tensors, slots, staging, disk)


class HostCopier:
    """Device and host are the same: plain indexing, done when it returns."""

    def __init__(self, layouts: Sequence[BlockLayout], pool: HostPool) -> None:
        self._layouts = layouts
        self._pool = pool

    def out(self, group: int, blocks: Int32, slots: Int32) -> Callable[[], bool]:
        for part, there in self._parts(group):
            there.index_copy_(0, _index(slots), part.index_select(0, _index(blocks)))
        return _at_once

    def into(self, group: int, blocks: Int32, slots: Int32) -> Callable[[], bool]:
        for part, there in self._parts(group):
            part.index_copy_(0, _index(blocks), there.index_select(0, _index(slots)))
        return _at_once

    def _parts(self, group: int) -> list[tuple[Tensor, Tensor]]:
        layout, whole = self._layouts[group], self._pool.whole(group)
        return [
            (part, whole[:, offset : offset + size])
            for part, offset, size in zip(layout.parts, layout.offsets, layout.sizes, strict=True)
        ]


def _index(ids: Int32) -> Tensor:
    return torch.from_numpy(ids.astype(np.int64))


def _at_once() -> bool:
    return True


class CudaCopier:
    """Kernels on streams; see the module."""

    def __init__(
        self, layouts: Sequence[BlockLayout], pool: HostPool, staging: int, device: torch.device
    ) -> None:
        if not all(layout.aligned for layout in layouts):
            raise ConfigError(
                "KV blocks whose parts are no multiples of 16 bytes cannot be kept on the host",
                "host_cache_gb",
            )
        self._layouts = layouts
        self._pool = pool
        self._device = device
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._staging = Staging(max(layout.size for layout in layouts), staging, device)

    def out(self, group: int, blocks: Int32, slots: Int32) -> Callable[[], bool]:
        layout, step = self._layouts[group], torch.cuda.current_stream(self._device)
        event: Any = None
        at = 0
        while at < len(blocks):
            places = self._staging.take(len(blocks) - at, step)
            end = at + len(places)
            staged = self._staging.addresses(places)
            self._copy(layout, self._on_device(layout, blocks[at:end]), staged)
            self._out.wait_stream(step)
            with torch.cuda.stream(self._out):
                there = self._pool.addresses(group, slots[at:end])
                self._pieces(staged, there, layout.size)
                event = self._out.record_event()
            self._staging.lend(places, event)
            at = end
        return _at_once if event is None else event.query

    def into(self, group: int, blocks: Int32, slots: Int32) -> Callable[[], bool]:
        layout = self._layouts[group]
        self._in.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._in):
            sources = self._pool.addresses(group, slots)
            for base, offset, size in self._on_device(layout, blocks):
                self._pieces(sources + offset, base, size)
            event: Any = self._in.record_event()
        return cast("Callable[[], bool]", event.query)

    @staticmethod
    def _on_device(layout: BlockLayout, blocks: Int32) -> list[tuple[Any, int, int]]:
        """Each part's (addresses, offset in a slot, bytes)."""
        ids = blocks.astype(np.int64)
        return [
            (part.data_ptr() + ids * size, offset, size)
            for part, offset, size in zip(layout.parts, layout.offsets, layout.sizes, strict=True)
        ]

    def _copy(self, layout: BlockLayout, parts: list[tuple[Any, int, int]], targets: Any) -> None:
        for base, offset, size in parts:
            self._pieces(base, targets + offset, size, wide=True)

    def _pieces(self, sources: Any, targets: Any, size: int, wide: bool = False) -> None:
        """On the current stream. wide: between places on the device, with all of it."""
        from quire.ops.triton.blocks import copy_pieces

        pair = torch.from_numpy(np.stack([sources, targets]))
        addresses = pair.pin_memory().to(self._device, non_blocking=True)
        if wide:
            copy_pieces(addresses, size, programs=1024)
        else:
            copy_pieces(addresses, size)


class Staging:
    """Places on the device where blocks wait to cross. `size`: bytes of a place."""

    def __init__(self, size: int, limit: int, device: torch.device) -> None:
        count = max(1, limit // size)
        self._size = size
        self._memory = torch.empty(count * size, dtype=torch.uint8, device=device)
        self._free = list(range(count))
        self._lent: deque[tuple[list[int], Any]] = deque()

    def take(self, most: int, step: Any) -> list[int]:
        """Between one and `most` places, which the stream `step` may write from now on: it waits
        where all of them are still being read."""
        while self._lent and (self._lent[0][1].query() or not self._free):
            places, event = self._lent.popleft()
            step.wait_event(event)
            self._free += places
        places, self._free = self._free[:most], self._free[most:]
        return places

    def lend(self, places: list[int], until: Any) -> None:
        """Takes places back that are read until an event."""
        self._lent.append((places, until))

    def addresses(self, places: list[int]) -> Any:
        return self._memory.data_ptr() + np.array(places, dtype=np.int64) * self._size
