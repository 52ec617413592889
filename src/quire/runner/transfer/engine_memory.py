"""The KV blocks of another engine, as descriptions of its ranks' memory, and where to read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from quire.arrays import Int32
from quire.runner.transfer.layout import BlockLayout, Part
from quire.runner.transfer.shared_memory import SharedMemory

MemoryKind = Literal["DRAM", "VRAM"]


class GroupMemory(msgspec.Struct, frozen=True):
    """The blocks of a KV group on one rank.

    addresses: of the first block, by tensor. first, end: the heads that the rank holds; 0 and 1
    where blocks are not cut into heads. owner: see `HeadRange`. blocks: how many there are.
    """

    addresses: list[int]
    first: int
    end: int
    owner: bool
    blocks: int


class RankMemory(msgspec.Struct, frozen=True):
    """The blocks of one rank. agent: how to reach it, in the transport's words. device: the number
    of the GPU, 0 on a CPU."""

    agent: bytes
    kind: MemoryKind
    device: int
    groups: list[GroupMemory]


class EngineMemory(msgspec.Struct, frozen=True):
    """The blocks of all ranks of an engine. clock: tells which layers have been written; None where
    readers are only named blocks that have been. See `LayerClock`."""

    ranks: list[RankMemory]
    clock: SharedMemory | None = None


@dataclass(frozen=True, slots=True)
class MemoryPieces:
    """Pieces of memory to be read: addresses and bytes, int64 [n] each."""

    here: Any
    there: Any
    sizes: Any

    def each(self) -> Iterator[tuple[int, int, int]]:
        """Yields the numbers of each piece."""
        columns = self.here.tolist(), self.there.tolist(), self.sizes.tolist()
        return zip(*columns, strict=True)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EngineMemory)


def encode_memory(ranks: Sequence[RankMemory], clock: SharedMemory | None = None) -> bytes:
    """Returns an engine's memory as bytes; see `Transfer.source`."""
    return _encoder.encode(EngineMemory(list(ranks), clock))


def decode_memory(data: bytes) -> EngineMemory:
    """Raises msgspec.DecodeError where the bytes describe no memory."""
    return _decoder.decode(data)


def group_memory(layout: BlockLayout, owner: bool) -> GroupMemory:
    """Describes a group's blocks on this rank. owner: where blocks are not cut into heads."""
    # Sections of one tensor have one address.
    addresses = list({part.tensor: part.data.data_ptr() for part in layout.parts}.values())
    blocks = len(layout.parts[0].data)
    heads = layout.heads
    if heads is None:
        return GroupMemory(addresses, 0, 1, owner, blocks)
    return GroupMemory(addresses, heads.first, heads.end, heads.owner, blocks)


def pieces_of(
    layout: BlockLayout,
    own: Int32,
    remote: GroupMemory,
    blocks: Int32,
    layers: range | None = None,
) -> MemoryPieces | None:
    """Returns what a rank reads of `blocks` of a remote rank into its blocks `own`, int32 [n] both:
    the heads that both hold, and only from the first of the ranks that hold them. None: nothing.

    layers: of the group, by their places in a block; None: all.

    Raises:
        ValueError: the remote blocks are not there.
    """
    if blocks.min() < 0 or blocks.max() >= remote.blocks:
        raise ValueError(f"blocks {blocks.tolist()} of {remote.blocks}")
    heads = layout.heads
    first, end = (0, 1) if heads is None else (heads.first, heads.end)
    low, high = max(first, remote.first), min(end, remote.end)
    if not remote.owner or low >= high:
        return None
    span = _HeadSpan(first, end, remote.first, remote.end, low, high)
    found = [
        _pieces(
            part, remote.addresses[part.tensor], own.astype(np.int64), blocks.astype(np.int64),
            span, range(part.layers) if layers is None else layers,
        )
        for part in layout.parts
        if not (span.whole and part.begin)  # the first section stands for all
    ]  # fmt: skip
    here, there, sizes = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    return MemoryPieces(here, there, sizes)


@dataclass(frozen=True, slots=True)
class _HeadSpan:
    """The heads `low` to `high` - 1, which are among `first` to `end` - 1 here and among
    `far_first` to `far_end` - 1 there."""

    first: int
    end: int
    far_first: int
    far_end: int
    low: int
    high: int

    @property
    def whole(self) -> bool:
        return (self.first, self.end) == (self.far_first, self.far_end)


def _pieces(
    part: Part, address: int, own: Any, blocks: Any, span: _HeadSpan, layers: range
) -> tuple[Any, Any, Any]:
    """Returns addresses here and there, and bytes, of some layers of one part of each block. Where
    heads are the same on both sides, these are of the whole tensor."""
    here_heads, far_heads = span.end - span.first, span.far_end - span.far_first
    far_run = part.run // here_heads * far_heads
    here = part.data.data_ptr() + own * (part.runs * part.run)
    there = address + blocks * (part.runs * far_run)
    layer = part.runs * part.run // part.layers
    size = len(layers) * layer
    if span.whole:
        here, there = here + layers.start * layer, there + layers.start * layer
    else:
        runs, head = part.runs // part.layers, part.size // here_heads
        far_begin = part.begin // here_heads * far_heads
        run = np.arange(layers.start * runs, layers.stop * runs, dtype=np.int64)
        here = here[:, None] + run * part.run + part.begin + (span.low - span.first) * head
        there = there[:, None] + run * far_run + far_begin + (span.low - span.far_first) * head
        size = (span.high - span.low) * head
    here, there = here.reshape(-1), there.reshape(-1)
    return here, there, np.full(len(here), size, dtype=np.int64)
