"""Tiles of experts' products, by a simple model of how many tokens an expert gets."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from quire.ops.weight import WeightFormat

GEMV_TOKENS = 4
"""Tokens up to which experts' weights are read once for each token that takes them."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile of bm tokens, bn outputs (gated: as many gates, and as many ups) and bk inputs. swap:
    weights are the left operand, which fills a Hopper warpgroup's 64 rows with them."""

    bm: int
    bn: int
    bk: int
    warps: int = 4
    stages: int = 1
    swap: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """One way to run a layer's experts. kernel: "gemv" for each token by itself, "grouped" for
    tokens in the order of experts. up, down: the tiles of the two products; a grouped plan has
    equal `bm` in both."""

    kernel: Literal["gemv", "grouped"]
    up: Tile
    down: Tile


class ExpertsShape(NamedTuple):
    """The shape that a choice depends on. dtype: of x. bits: of a stored weight."""

    tokens: int
    experts: int
    top_k: int
    hidden: int
    width: int
    dtype: torch.dtype
    bits: int

    @property
    def mean(self) -> float:
        """Tokens of an expert, if they are spread evenly over those that get any."""
        taken = self.experts * (1 - (1 - 1 / self.experts) ** (self.tokens * self.top_k))
        return self.tokens * self.top_k / max(taken, 1.0)


def bits_of(format: WeightFormat) -> int:
    return format.bits or 8 * format.values.itemsize


FIXED = ExpertsPlan("grouped", Tile(32, 32, 64, 4, 3), Tile(32, 64, 64, 4, 3))
"""One plan for any shape, so that a token's result is the same to the bit whatever else is in the
batch."""


@functools.lru_cache(maxsize=4096)
def plan_for(shape: ExpertsShape) -> ExpertsPlan:
    """Returns the plan of a shape."""
    if shape.tokens <= GEMV_TOKENS:
        return ExpertsPlan("gemv", _row_tile(shape, gated=True), _row_tile(shape, gated=False))
    wide = shape.dtype == torch.float32
    if shape.mean <= 24:
        # A read of weights: tiles that keep many loads under way, whatever the tokens.
        if wide or shape.bits < 8:
            bk, stages = (64, 3) if wide else (128, 4)
            up, down = Tile(16, 32, bk, 4, stages), Tile(16, 64, bk, 4, stages)
        else:
            swap = shape.bits >= 16
            up, down = Tile(16, 64, 128, 4, 3, swap), Tile(16, 128, 128, 4, 3, swap)
        return ExpertsPlan("grouped", up, down)
    if shape.mean <= 48 or wide:
        return ExpertsPlan("grouped", Tile(32, 64, 64, 4, 3), Tile(32, 128, 64, 4, 3))
    if shape.mean <= 96:
        return ExpertsPlan("grouped", Tile(64, 64, 64, 4, 3), Tile(64, 128, 64, 4, 3))
    return ExpertsPlan("grouped", Tile(128, 64, 64, 8, 3), Tile(128, 128, 64, 8, 3))


def _row_tile(shape: ExpertsShape, *, gated: bool) -> Tile:
    """A tile of a GEMV: a few rows of weights, as long as registers allow. Rows of few bits are
    short, so that more of them have to be under way."""
    if gated:
        return Tile(1, 4, 1024, 4, 1 if shape.bits >= 16 else 3)
    if shape.bits >= 16:
        return Tile(1, 4, 512, 4)
    return Tile(1, 4, 1024 if shape.bits < 8 and shape.width >= 1024 else 256, 4)
