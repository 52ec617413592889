"""Tiles of experts' products, by a simple model of how many tokens an expert gets."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from quire.ops.triton.gemm_plan import CHUNK_WORDS
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
class MmaTile:
    """A tile of `rows` times 16 weight rows (gated: 8 gates and their ups) and `columns` times 8
    tokens. chunks: of 64 bytes of a row that each of its warps has under way."""

    rows: int
    columns: int
    warps: int
    chunks: int

    @property
    def bm(self) -> int:
        """Returns the tokens of a tile."""
        return 8 * self.columns


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """One way to run a layer's experts. kernel: "gemv" for each token by itself, "grouped" for
    tokens in the order of experts. up, down: the tiles of the two products; a grouped plan has
    equal `bm` in both."""

    kernel: Literal["gemv", "grouped"]
    up: Tile | MmaTile
    down: Tile | MmaTile


class ExpertsShape(NamedTuple):
    """The shape that a choice depends on. dtype: of x. bits: of a stored weight. mma: whether
    `experts_mma` takes the weights, on this card."""

    tokens: int
    experts: int
    top_k: int
    hidden: int
    width: int
    dtype: torch.dtype
    bits: int
    mma: bool = False

    @property
    def mean(self) -> float:
        """Tokens of an expert, if they are spread evenly over those that get any."""
        taken = self.experts * (1 - (1 - 1 / self.experts) ** (self.tokens * self.top_k))
        return self.tokens * self.top_k / max(taken, 1.0)


def bits_of(format: WeightFormat) -> int:
    return format.bits or 8 * format.values.itemsize


USE_MMA = True
"""Whether plans choose `experts_mma` where it is expected to be faster."""
FIXED_UP = Tile(32, 32, 64, 4, 3)
FIXED_DOWN = Tile(32, 64, 64, 4, 3)
"""Tiles for any shape, so that a token's result is the same to the bit whatever else is in the
batch."""


@functools.lru_cache(maxsize=4096)
def plan_for(shape: ExpertsShape) -> ExpertsPlan:
    """Returns the plan of a shape."""
    if shape.mma and USE_MMA:
        found = _mma_plan(shape)
        if found is not None:
            return found
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


def _mma_plan(shape: ExpertsShape) -> ExpertsPlan | None:
    """Returns the plan of few tokens per expert on tensor cores, None if there are too many."""
    if shape.tokens <= GEMV_TOKENS:
        return ExpertsPlan(
            "gemv", _direct_tile(shape.hidden * shape.bits), _sum_tile(shape),
        )  # fmt: skip
    if shape.bits >= 16 or shape.mean > 32:
        return None
    columns = 1 if shape.mean <= 5 else 2 if shape.mean <= 14 else 4
    rows = 2 if columns <= 2 else 1
    up = MmaTile(rows, columns, 4, _chunks(shape.hidden * shape.bits, 4, 2 // rows))
    down = MmaTile(rows, columns, 4, _chunks(shape.width * shape.bits, 4, 2 // rows))
    return ExpertsPlan("grouped", up, down)


def _chunks(bits: int, warps: int, most: int) -> int:
    """Returns the chunks that each of some warps has under way of a row: all, or few enough."""
    return max(1, min(most, -(-bits // (CHUNK_WORDS * 32 * warps))))


def _direct_tile(bits: int) -> MmaTile:
    """A tile of one token, for rows of some bits: long rows take more warps."""
    warps = 8 if bits > 16 * CHUNK_WORDS * 32 else 4
    return MmaTile(1, 0, warps, _chunks(bits, warps, 4))


def _sum_tile(shape: ExpertsShape) -> MmaTile:
    """A tile of the sum over a token's experts: there are few, which take many warps."""
    chunks = _chunks(shape.top_k * shape.width * shape.bits, 8, 1 << 16)
    if chunks <= 6:
        return MmaTile(1, 0, 8, chunks)
    return MmaTile(1, 0, 16, 4 if shape.bits >= 16 else 2)


def _row_tile(shape: ExpertsShape, *, gated: bool) -> Tile:
    """A tile of a GEMV: a few rows of weights, as long as registers allow. Rows of few bits are
    short, so that more of them have to be under way."""
    if gated:
        return Tile(1, 4, 1024, 4, 1 if shape.bits >= 16 else 3)
    if shape.bits >= 16:
        return Tile(1, 4, 512, 4)
    return Tile(1, 4, 1024 if shape.bits < 8 and shape.width >= 1024 else 256, 4)
