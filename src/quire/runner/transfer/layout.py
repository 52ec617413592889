"""Blocks as bytes outside of the device, whole or as the heads that one rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_ALIGN = 16


@dataclass(frozen=True, slots=True)
class HeadCut:
    """The split of a tensor of a layer's block among ranks. axis: the dimension of heads. What is
    from there on are sections one after the other, of which each rank has its heads' share.
    sections: their sizes, in any unit."""

    axis: int = 1
    sections: tuple[int, ...] = (1,)


@dataclass(frozen=True, slots=True)
class HeadRange:
    """The heads `first` to `end` - 1, of `heads` in all, that a rank holds.

    owner: it is the first of the ranks that hold these heads. Only owners write them elsewhere.
    cuts: by tensor; (): all are keys and values, [2, heads, ...].
    """

    first: int
    end: int
    heads: int
    owner: bool = True
    cuts: tuple[HeadCut, ...] = ()


def head_range(heads: int, rank: int, world: int, cuts: tuple[HeadCut, ...] = ()) -> HeadRange:
    """Returns the KV heads of one rank: neighbouring ranks hold copies where heads are fewer.

    The split is that of the weights (`ShardSpec`), so one of the two numbers divides the other.
    """
    if heads >= world:
        each = heads // world
        return HeadRange(rank * each, (rank + 1) * each, heads, cuts=cuts)
    first = rank * heads // world
    return HeadRange(first, first + 1, heads, owner=rank * heads % world == 0, cuts=cuts)


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor's share of a block, or a section of it.

    data: uint8 [blocks, runs * run], a block's bytes on this rank: `runs` runs of `run` bytes, of
        which the part has `size` from `begin` on.
    offset: where the tensor begins in a slot. There a run takes `whole` bytes, and the part's share
        of it begins at `first`.
    layers: that it holds, one after the other.
    """

    tensor: int
    data: Tensor
    runs: int
    run: int
    begin: int
    size: int
    offset: int
    whole: int
    first: int
    layers: int

    def on_device(self) -> Tensor:
        """Returns the share of each block, uint8 [blocks, runs, size]."""
        runs = self.data.view(len(self.data), self.runs, self.run)
        return runs[:, :, self.begin : self.begin + self.size]

    def in_slots(self, slots: Tensor) -> Tensor:
        """Returns the share of each slot, a view of uint8 [slots, bytes]: [slots, runs, size]."""
        share = slots[:, self.offset : self.offset + self.runs * self.whole]
        strides = slots.stride(0), self.whole, 1
        pieces = share.as_strided((len(slots), self.runs, self.whole), strides)
        return pieces[:, :, self.first : self.first + self.size]


class BlockLayout:
    """A group's block outside of the device: the same place in each of the group's tensors, one
    after the other, each padded to 16 bytes. A slot has the heads of all ranks, as a rank would
    that is alone.

    tensors: [blocks, layers, ...]. heads: those of this rank; None: the tensors have all.
    """

    def __init__(self, tensors: Sequence[Tensor], heads: HeadRange | None = None) -> None:
        self.parts: list[Part] = []
        self.heads = heads
        self.size = 0
        """Bytes of a slot."""
        for index, tensor in enumerate(tensors):
            data = tensor.view(len(tensor), -1).view(torch.uint8)
            runs, share, first, cut = 1, 1, 0, HeadCut()
            if heads is not None:
                cut = heads.cuts[index] if heads.cuts else cut
                runs = int(np.prod(tensor.shape[1 : 2 + cut.axis]))
                share, first = heads.end - heads.first, heads.first
            all_heads = share if heads is None else heads.heads
            run, begin = data.shape[1] // runs, 0
            for section in cut.sections:
                size = run * section // sum(cut.sections)
                # Before it in a slot: the sections before, of all ranks, and other ranks' heads.
                place = (begin * all_heads + size * first) // share
                whole = run // share * all_heads
                self.parts.append(
                    Part(
                        index, data, runs, run, begin, size, self.size, whole, place,
                        tensor.shape[1],
                    )
                )  # fmt: skip
                begin += size
            self.size += -(-runs * whole // _ALIGN) * _ALIGN

    @property
    def aligned(self) -> bool:
        """Whether each piece of each block begins and ends at a multiple of 16 bytes."""
        return not any(
            number % _ALIGN
            for part in self.parts
            for number in (part.size, part.whole, part.first, part.run, part.begin)
        )
