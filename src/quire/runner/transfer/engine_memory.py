"""Descriptions of the memory of another engine's KV blocks, and the pieces of it to read."""

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

    Attributes:
        addresses: address of the first block, by tensor.
        first: first head that the rank holds; 0 if blocks are not split into heads.
        end: end of its heads; 1 if blocks are not split into heads.
        owner: see `HeadRange`.
        blocks: number of blocks.
    """

    addresses: list[int]
    first: int
    end: int
    owner: bool
    blocks: int


class RankMemory(msgspec.Struct, frozen=True):
    """The blocks of one rank.

    Attributes:
        agent: metadata by which the transport reaches the rank.
        device: number of the GPU, 0 on a CPU.
    """

    agent: bytes
    kind: MemoryKind
    device: int
    groups: list[GroupMemory]


class EngineMemory(msgspec.Struct, frozen=True):
    """The blocks of all ranks of an engine.

    Attributes:
        clock: counts the layers that have been written (`LayerClock`). None if readers only get
            blocks that are complete.
    """

    ranks: list[RankMemory]
    clock: SharedMemory | None = None


@dataclass(frozen=True, slots=True)
class MemoryPieces:
    """Pieces of memory to read.

    Attributes:
        local: addresses in this process, int64 [n].
        remote: addresses in the peer, int64 [n].
        sizes: bytes, int64 [n].
    """

    local: Any
    remote: Any
    sizes: Any

    def each(self) -> Iterator[tuple[int, int, int]]:
        """Yields (local, remote, size) of each piece."""
        columns = self.local.tolist(), self.remote.tolist(), self.sizes.tolist()
        return zip(*columns, strict=True)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EngineMemory)


def encode_memory(ranks: Sequence[RankMemory], clock: SharedMemory | None = None) -> bytes:
    """Returns an engine's memory as bytes, for `Transfer.source`."""
    return _encoder.encode(EngineMemory(list(ranks), clock))


def decode_memory(data: bytes) -> EngineMemory:
    """Returns the memory that bytes describe.

    Raises:
        msgspec.DecodeError: the bytes describe no memory.
    """
    return _decoder.decode(data)


def group_memory(layout: BlockLayout, owner: bool) -> GroupMemory:
    """Describes a group's blocks on this rank.

    Args:
        owner: `GroupMemory.owner` of a group whose blocks are not split into heads.
    """
    # Sections of one tensor have one address.
    addresses = list({part.tensor: part.data.data_ptr() for part in layout.parts}.values())
    blocks = len(layout.parts[0].data)
    heads = layout.heads
    if heads is None:
        return GroupMemory(addresses, 0, 1, owner, blocks)
    return GroupMemory(addresses, heads.first, heads.end, heads.owner, blocks)


def find_pieces(
    layout: BlockLayout,
    own: Int32,
    remote: GroupMemory,
    blocks: Int32,
    layers: range | None = None,
) -> MemoryPieces | None:
    """Returns the pieces of a remote rank's blocks that this rank reads, or None if there are none.

    A rank reads the heads that both ranks hold, and each head only from its owner.

    Args:
        own: int32 [n], blocks of this rank.
        blocks: int32 [n], blocks of the remote rank.
        layers: places of the layers in a block; None for all.

    Raises:
        ValueError: the remote rank has no such blocks.
    """
    if blocks.min() < 0 or blocks.max() >= remote.blocks:
        raise ValueError(f"blocks {blocks.tolist()} of {remote.blocks}")
    heads = layout.heads
    first, end = (0, 1) if heads is None else (heads.first, heads.end)
    low, high = max(first, remote.first), min(end, remote.end)
    if not remote.owner or low >= high:
        return None
    span = _HeadSpan(first, end, remote.first, remote.end, low, high)
    each_part = [
        _pieces(
            part, remote.addresses[part.tensor], own.astype(np.int64), blocks.astype(np.int64),
            span, range(part.layers) if layers is None else layers,
        )
        for part in layout.parts
        if not (span.whole and part.begin)  # The first section stands for all sections.
    ]  # fmt: skip
    return MemoryPieces(*(np.concatenate(arrays) for arrays in zip(*each_part, strict=True)))


@dataclass(frozen=True, slots=True)
class _HeadSpan:
    """The heads that two ranks share.

    They are the heads `low` to `high - 1`. This rank holds `first` to `end - 1`, the remote one
    `far_first` to `far_end - 1`.
    """

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
    """Returns (local, remote, bytes) of some layers of one part of each block.

    If both ranks hold the same heads, the pieces are of the whole tensor.
    """
    here_heads, far_heads = span.end - span.first, span.far_end - span.far_first
    far_run = part.run // here_heads * far_heads
    local = part.data.data_ptr() + own * (part.runs * part.run)
    remote = address + blocks * (part.runs * far_run)
    layer = part.runs * part.run // part.layers
    size = len(layers) * layer
    if span.whole:
        local, remote = local + layers.start * layer, remote + layers.start * layer
    else:
        runs, head = part.runs // part.layers, part.size // here_heads
        far_begin = part.begin // here_heads * far_heads
        run = np.arange(layers.start * runs, layers.stop * runs, dtype=np.int64)
        local = local[:, None] + run * part.run + part.begin + (span.low - span.first) * head
        remote = remote[:, None] + run * far_run + far_begin + (span.low - span.far_first) * head
        size = (span.high - span.low) * head
    local, remote = local.reshape(-1), remote.reshape(-1)
    return local, remote, np.full(len(local), size, dtype=np.int64)
