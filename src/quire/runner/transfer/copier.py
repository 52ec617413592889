"""Copies of KV blocks between the device and the host's memory.

**Out.** The step's own stream gathers the blocks into a staging buffer on the device, before the
step writes anything. That takes a fraction of a microsecond per block. A second stream then copies
the buffer over the host link while the step computes. So the step that moves a block out may
overwrite it: stream order alone protects the copy. If a step moves out more than the buffer holds,
its body waits until a part of the buffer is free again.

**In.** A third stream copies the blocks, after it has waited for all work launched before, because
earlier steps may still read the old contents. No step waits for the copy. The scheduler learns when
it has ended, and only then plans a step that reads the blocks.

One copy call per block would reach a sixth of the link's rate. So a kernel moves all blocks of a
transfer at once, and reads or writes the pinned memory itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from quire.arrays import Int32
from quire.errors import ConfigError
from quire.runner.transfer.layout import BlockLayout


class Slots(Protocol):
    """Host memory with slots for each group, each as large as a block."""

    def view(self, group: int, slot: int) -> memoryview:
        """Returns a slot's bytes, writable."""
        ...

    def addresses(self, group: int, slots: Int32) -> Any:
        """Returns the addresses of slots, int64 [n]."""
        ...

    def whole(self, group: int) -> Tensor:
        """Returns all of a group's slots, uint8 [slots, bytes]; they must be in one piece."""
        ...


class Copier(Protocol):
    """Copies blocks between device and host.

    `out` copies from the device to the host, and `into` to the device. Both return at once, with a
    function that returns whether the copy is done.
    """

    def out(self, group: int, blocks: Int32, slots: Int32) -> Callable[[], bool]: ...

    def into(self, group: int, blocks: Int32, slots: Int32) -> Callable[[], bool]: ...


class HostCopier:
    """Copies blocks on a CPU, by indexing. A copy is done when the call returns."""

    def __init__(self, layouts: Sequence[BlockLayout], pool: Slots) -> None:
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
        whole = self._pool.whole(group)
        return [(part.on_device(), part.in_slots(whole)) for part in self._layouts[group].parts]


def _index(ids: Int32) -> Tensor:
    return torch.from_numpy(ids.astype(np.int64))


def _at_once() -> bool:
    return True


class CudaCopier:
    """Copies blocks of a GPU, by kernels on streams; see the module."""

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        pool: Slots,
        staging: Sequence[int],
        device: torch.device,
    ) -> None:
        if not all(layout.aligned for layout in layouts):
            raise ConfigError(
                "KV blocks whose parts are not multiples of 16 bytes cannot be kept on the host",
                "host_cache_gb",
            )
        self._layouts = layouts
        self._pool = pool
        self._device = device
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._staging = [
            Staging(layout.size, limit, device)
            for layout, limit in zip(layouts, staging, strict=True)
        ]

    def out(self, group: int, blocks: Int32, slots: Int32) -> Callable[[], bool]:
        layout, step = self._layouts[group], torch.cuda.current_stream(self._device)
        staging = self._staging[group]
        event: Any = None
        at = 0
        while at < len(blocks):
            places = staging.take(len(blocks) - at, step)
            end = at + len(places)
            staged = staging.addresses(places)
            self._copy(layout, self._on_device(layout, blocks[at:end]), staged)
            self._out.wait_stream(step)
            with torch.cuda.stream(self._out):
                there = self._pool.addresses(group, slots[at:end])
                self._pieces(staged, there, layout.size)
                event = self._out.record_event()
            staging.lend(places, event)
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
        """Returns (addresses, offset in a slot, bytes) of each part."""
        ids = blocks.astype(np.int64)
        return [
            (part.data.data_ptr() + ids * part.size, part.offset, part.size)
            for part in layout.parts
        ]

    def _copy(self, layout: BlockLayout, parts: list[tuple[Any, int, int]], targets: Any) -> None:
        for base, offset, size in parts:
            self._pieces(base, targets + offset, size, wide=True)

    def _pieces(self, sources: Any, targets: Any, size: int, wide: bool = False) -> None:
        copy_between(sources, targets, size, self._device, wide)


class PinnedCopier:
    """Copies the heads of one rank to and from slots of all heads.

    It has no staging buffer, so a block must not change until its copy out is done.
    """

    def __init__(self, layouts: Sequence[BlockLayout], pool: Slots, device: torch.device) -> None:
        if not all(layout.aligned for layout in layouts):
            raise ConfigError(
                "KV blocks whose parts are not multiples of 16 bytes cannot go to peers", "role"
            )
        self._layouts = layouts
        self._pool = pool
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]

    def out(self, group: int, blocks: Int32, slots: Int32) -> Callable[[], bool]:
        return self._copy(group, blocks, slots, outward=True)

    def into(self, group: int, blocks: Int32, slots: Int32) -> Callable[[], bool]:
        return self._copy(group, blocks, slots, outward=False)

    def _copy(self, group: int, blocks: Int32, slots: Int32, outward: bool) -> Callable[[], bool]:
        stream = self._streams[outward]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            bases = self._pool.addresses(group, slots)
            for part in self._layouts[group].parts:
                run = np.arange(part.runs, dtype=np.int64)
                here = (blocks.astype(np.int64)[:, None] * part.runs + run) * part.run
                inside = (part.data.data_ptr() + here + part.begin).reshape(-1)
                outside = (bases[:, None] + part.offset + run * part.whole + part.first).reshape(-1)
                source, target = (inside, outside) if outward else (outside, inside)
                copy_between(source, target, part.size, self._device)
            event: Any = stream.record_event()
        return cast("Callable[[], bool]", event.query)


def copy_between(
    sources: Any, targets: Any, size: int, device: torch.device, wide: bool = False
) -> None:
    """Copies pieces of `size` bytes on the current stream.

    Args:
        sources: addresses, int64 [n].
        targets: addresses, int64 [n].
        wide: whether to use the whole device, which suits copies within it.
    """
    # Imported here because it imports Triton, which a CPU need not have.
    from quire.ops.triton.step.blocks import copy_pieces

    pair = torch.from_numpy(np.stack([sources, targets]))
    addresses = pair.pin_memory().to(device, non_blocking=True)
    if wide:
        copy_pieces(addresses, size, programs=1024)
    else:
        copy_pieces(addresses, size)


class Staging:
    """Places on the device where blocks wait for their copy to the host.

    Args:
        size: bytes of a place.
        limit: most bytes of all places.
    """

    def __init__(self, size: int, limit: int, device: torch.device) -> None:
        count = max(1, limit // size)
        self._size = size
        self._memory = torch.empty(count * size, dtype=torch.uint8, device=device)
        self._free = list(range(count))
        self._lent: deque[tuple[list[int], Any]] = deque()

    def take(self, most: int, step: Any) -> list[int]:
        """Returns between one and `most` places that the stream `step` may write.

        If copies still read all places, the stream waits for the first of them.
        """
        while self._lent and (self._lent[0][1].query() or not self._free):
            places, event = self._lent.popleft()
            step.wait_event(event)
            self._free += places
        places, self._free = self._free[:most], self._free[most:]
        return places

    def lend(self, places: list[int], until: Any) -> None:
        """Lends places to copies, which read them until the event `until`."""
        self._lent.append((places, until))

    def addresses(self, places: list[int]) -> Any:
        return self._memory.data_ptr() + np.array(places, dtype=np.int64) * self._size
