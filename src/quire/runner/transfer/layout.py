"""The bytes of a block outside the device, whole or as the heads that one rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_ALIGN = 16


@dataclass(frozen=True, slots=True)
class HeadCut:
    """The split of a tensor of a layer's block among ranks.

    Attributes:
        axis: the dimension of heads. It consists of one or more sections, and each rank has its
            heads' part of every section.
        sections: sizes of the sections, in any unit.
    """

    axis: int = 1
    sections: tuple[int, ...] = (1,)


@dataclass(frozen=True, slots=True)
class HeadRange:
    """The heads that a rank holds: `first` to `end - 1`.

    Attributes:
        heads: number of heads of all ranks.
        owner: whether the rank is the first one that holds these heads. Only owners copy them to
            other places.
        cuts: by tensor; () if all tensors are keys and values, [2, heads, ...].
    """

    first: int
    end: int
    heads: int
    owner: bool = True
    cuts: tuple[HeadCut, ...] = ()


def head_range(heads: int, rank: int, world: int, cuts: tuple[HeadCut, ...] = ()) -> HeadRange:
    """Returns the KV heads of one rank. With fewer heads than ranks, neighbours hold copies.

    The split is that of the weights (`ShardSpec`), so `heads` divides `world`, or `world` divides
    `heads`.
    """
    if heads >= world:
        each = heads // world
        return HeadRange(rank * each, (rank + 1) * each, heads, cuts=cuts)
    first = rank * heads // world
    return HeadRange(first, first + 1, heads, owner=rank * heads % world == 0, cuts=cuts)


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a block, or a section of it.

    Attributes:
        data: uint8 [blocks, runs * run], a block's bytes on this rank.
        runs: number of runs of a block.
        run: bytes of a run on this rank.
        begin: offset of the part in a run on this rank, in bytes.
        size: bytes of the part in a run.
        offset: offset of the tensor in a slot, in bytes.
        whole: bytes of a run in a slot. It has the heads of all ranks.
        first: offset of the part in a run of a slot, in bytes.
        layers: number of layers, one after the other.
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
        """Returns the part of each block, uint8 [blocks, runs, size]."""
        runs = self.data.view(len(self.data), self.runs, self.run)
        return runs[:, :, self.begin : self.begin + self.size]

    def in_slots(self, slots: Tensor) -> Tensor:
        """Returns the part of each slot, a view of `slots`: uint8 [slots, runs, size].

        Args:
            slots: uint8 [slots, bytes].
        """
        share = slots[:, self.offset : self.offset + self.runs * self.whole]
        strides = slots.stride(0), self.whole, 1
        pieces = share.as_strided((len(slots), self.runs, self.whole), strides)
        return pieces[:, :, self.first : self.first + self.size]


class BlockLayout:
    """The layout of a group's block outside the device.

    A slot holds the block's bytes in each of the group's tensors, one after the other, each padded
    to 16 bytes. It has the heads of all ranks, so it looks the same for any number of ranks.

    Args:
        tensors: [blocks, layers, ...] each.
        heads: the heads of this rank; None if the tensors have all heads.
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
                # In a slot, the earlier sections of all ranks come first. Within a section, the
                # heads of earlier ranks come first.
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
        """Whether all pieces of all blocks begin and end at multiples of 16 bytes."""
        return not any(
            number % _ALIGN
            for part in self.parts
            for number in (part.size, part.whole, part.first, part.run, part.begin)
        )
