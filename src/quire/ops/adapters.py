"""Low-rank adapters as the ops see them: the weights of all slots, and the slots of a step's
tokens.

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
    """One linear layer's adapters in every slot. A is [rows, inputs]; B is [outputs, rank rounded
    up to a multiple of 8].

    Attributes:
        memory: [slots, elements], A and B of all layers of a slot, in the model's dtype.
        table: int32 [slots, 2 + 4 * projections], strided. A line begins with the layer's place of
            A in its slot and its rows of A, 0 if the slot has no adapter for this layer. A has the
            projections' rows one after the other. Then for each projection: its place of B, its
            rank, its first row of A, and the bits of its scale, a float32.
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
    """The tokens of a step that use adapters. The twins read `slots` only, and leave the others
    empty.

    Attributes:
        slots: int32 [T], each token's slot, -1 for none.
        order: int32 [T], the tokens of slot 0, then the tokens of slot 1, and so on; the rest is
            undefined.
        tiles: int32 [most, 4], (slot, first place in `order`, tokens) of runs of at most `tile`
            tokens of one slot. The last column lists the slots, each once.
        num_tiles: int32 [2], the number of runs and the number of slots.
        tile: the most tokens of a run.
    """

    slots: Tensor
    order: Tensor
    tiles: Tensor
    num_tiles: Tensor
    tile: int = 0


def padded_rank(rank: int) -> int:
    """Returns the width of B of an adapter; it makes B's rows begin at multiples of 16 bytes."""
    return -(-rank // 8) * 8


def scale_bits(scale: float) -> int:
    """Returns the float32 bits of a scale, as the table stores them."""
    return int(torch.tensor(scale, dtype=torch.float32).view(torch.int32))
