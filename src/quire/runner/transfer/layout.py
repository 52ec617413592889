"""Blocks as bytes outside of the device, whole or as the heads that one rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_ALIGN = 16


@dataclass(frozen=True, slots=True)
class HeadRange:
    """The heads `first` to `end` - 1, of `heads` in all, that a rank holds.

    axis: the dimension of heads in a layer's part of a block.
    owner: it is the first of the ranks that hold these heads. Only owners write them elsewhere.
    """

    first: int
    end: int
    heads: int
    axis: int = 1
    owner: bool = True


def head_range(heads: int, rank: int, world: int) -> HeadRange:
    """Returns the KV heads of one rank: neighbouring ranks hold copies where heads are fewer.

    The split is that of the weights (`ShardSpec`), so one of the two numbers divides the other.
    """
    if heads >= world:
        each = heads // world
        return HeadRange(rank * each, (rank + 1) * each, heads)
    first = rank * heads // world
    return HeadRange(first, first + 1, heads, owner=rank * heads % world == 0)


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor's share of a block.

    data: uint8 [blocks, runs * size], a block's bytes on this rank: `runs` pieces of `size` bytes.
    offset: where the share begins in a slot. There piece i begins at i * `whole` + `first`.
    layers: that it holds, one after the other.
    """

    data: Tensor
    runs: int
    size: int
    offset: int
    whole: int
    first: int
    layers: int

    def on_device(self) -> Tensor:
        """Returns the share of each block, uint8 [blocks, runs, size]."""
        return self.data.view(len(self.data), self.runs, self.size)

    def in_slots(self, slots: Tensor) -> Tensor:
        """Returns the share of each slot, a view of uint8 [slots, bytes]: [slots, runs, size]."""
        share = slots[:, self.offset : self.offset + self.runs * self.whole]
        strides = slots.stride(0), self.whole, 1
        pieces = share.as_strided((len(slots), self.runs, self.whole), strides)
        return pieces[:, :, self.first : self.first + self.size]


class BlockLayout:
    """A group's block outside of the device: the same place in each of the group's tensors, one
    after the other, each padded to 16 bytes. A slot has the heads of all ranks.

    tensors: [blocks, layers, ...]. heads: those of this rank; None: the tensors have all.
    """

    def __init__(self, tensors: Sequence[Tensor], heads: HeadRange | None = None) -> None:
        self.parts: list[Part] = []
        self.heads = heads
        self.size = 0
        """Bytes of a slot."""
        for tensor in tensors:
            data = tensor.view(len(tensor), -1).view(torch.uint8)
            runs, whole, first, size = 1, data.shape[1], 0, data.shape[1]
            if heads is not None:
                runs = int(np.prod(tensor.shape[1 : 2 + heads.axis]))
                size = data.shape[1] // runs
                head = size // (heads.end - heads.first)
                whole, first = heads.heads * head, heads.first * head
            self.parts.append(Part(data, runs, size, self.size, whole, first, tensor.shape[1]))
            self.size += -(-runs * whole // _ALIGN) * _ALIGN

    @property
    def aligned(self) -> bool:
        """Whether each piece of each block begins and ends at a multiple of 16 bytes."""
        numbers = [n for part in self.parts for n in (part.size, part.whole, part.first)]
        return not any(number % _ALIGN for number in numbers)
