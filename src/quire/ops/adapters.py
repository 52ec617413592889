"""Arguments of the ops for low-rank adapters: the weights of all slots, and each token's slot.

An adapter (LoRA, Hu et al. 2021) adds scale * B (A x) to a projection's products. Several adapters,
of different ranks, are in the device's slots at once. A step's tokens may use any of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

HEAD = 2
"""Words of a table's line before the words of its projections."""
WORDS = 4
"""Words of a table's line for each projection."""


@dataclass(frozen=True, slots=True)
class SlotWeights:
    """One linear layer's adapters in every slot.

    A is [rows, inputs] and has the rows of all projections, one after the other. Each projection
    has its own B, [outputs, rank rounded up to a multiple of 8].

    Attributes:
        memory: [slots, elements], A and B of all layers of a slot, in the model's dtype.
        table: int32 [slots, 2 + 4 * projections], strided. A slot's line begins with the offset of
            this layer's A in the slot and its number of rows, 0 without an adapter for the layer.
            Four words for each projection follow: the offset of its B, its rank, its first row of
            A, and the float32 bits of its scale.
        sizes: outputs of each projection on this rank.
        inputs: inputs of the layer on this rank.
        rank: the largest rank that a slot has room for.
    """

    memory: Tensor
    table: Tensor
    sizes: tuple[int, ...]
    inputs: int
    rank: int

    @property
    def rows(self) -> int:
        """The most rows of A."""
        return self.rank * len(self.sizes)


class AdapterRows(NamedTuple):
    """The tokens of a step that use adapters. The twins read only `slots` and leave the other
    fields empty.

    Attributes:
        slots: int32 [T], each token's slot, -1 for none.
        order: int32 [T], the tokens of slot 0, then the tokens of slot 1, and so on. The places of
            tokens without a slot are undefined.
        tiles: int32 [most, 4]. The first three columns describe a tile, which has at most `tile`
            tokens of one slot: (slot, first place in `order`, number of tokens). The last column
            lists the slots in use, each once.
        num_tiles: int32 [2], number of tiles and number of slots in use.
        tile: the most tokens of a tile.
    """

    slots: Tensor
    order: Tensor
    tiles: Tensor
    num_tiles: Tensor
    tile: int = 0


def padded_rank(rank: int) -> int:
    """Returns the stored width of an adapter's B. Rows of B begin at multiples of 16 bytes."""
    return -(-rank // 8) * 8


def scale_bits(scale: float) -> int:
    """Returns the float32 bits of a scale, as the table stores them."""
    return int(torch.tensor(scale, dtype=torch.float32).view(torch.int32))
