"""Chooses the tiles of experts' products, by a simple model of the tokens that an expert gets."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from typing import Any, Literal, NamedTuple

import torch

from quire.ops.triton.products.plan import CHUNK_WORDS
from quire.ops.triton.products.plans import Plans
from quire.ops.weight import WeightFormat

GEMV_TOKENS = 4
"""Up to this many tokens, an expert's weights are read again for each token that chooses it."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile of `grouped_kernel`, or of a GEMV.

    Attributes:
        bm: tokens.
        bn: outputs. A gated tile has bn gate rows and bn up rows.
        bk: inputs.
        warps: warps of a program.
        stages: tiles in flight.
        swap: weights are the left operand, and fill the 64 rows of a Hopper warpgroup.
    """

    bm: int
    bn: int
    bk: int
    warps: int = 4
    stages: int = 1
    swap: bool = False


@dataclass(frozen=True, slots=True)
class MmaTile:
    """A tile of `mma_kernels.py`.

    Attributes:
        rows: number of weight rows / 16. In gated layers 16 rows are 8 gate rows and the matching
            up rows.
        columns: number of tokens / 8.
        warps: warps of a program.
        chunks: chunks of 64 bytes of a row that each warp has in flight.
        early: inputs are requested together with their weights instead of after the weights have
            arrived.
    """

    rows: int
    columns: int
    warps: int
    chunks: int
    early: bool = False

    @property
    def bm(self) -> int:
        """Returns the number of tokens of a tile."""
        return 8 * self.columns


@dataclass(frozen=True, slots=True)
class IntegerTile:
    """A tile of 8 units or 16 outputs of one token, see `integer.py`.

    Attributes:
        warps: warps of a program.
        ahead: pieces of 256 inputs that each warp has in flight.
    """

    warps: int
    ahead: int

    @property
    def bm(self) -> int:
        """Returns the number of tokens of a tile."""
        return 1


@dataclass(frozen=True, slots=True)
class RingTile:
    """A tile of 128 tokens and 256 weight rows on a Hopper card, see `hopper_experts`.

    Attributes:
        stages: stages of 64 inputs in flight.
    """

    stages: int = 4

    @property
    def bm(self) -> int:
        """Returns the number of tokens of a tile."""
        return 128


AnyTile = Tile | MmaTile | IntegerTile | RingTile


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """One way to run a layer's experts.

    Attributes:
        kernel: "gemv" for each token by itself, "grouped" for tokens in the order of experts.
        up: tile of the first product.
        down: tile of the second product. In a grouped plan both tiles have the same `bm`, and both
            are `RingTile` or neither is.
        expand: all experts' weights are first widened to x's dtype.
    """

    kernel: Literal["gemv", "grouped"]
    up: AnyTile
    down: AnyTile
    expand: bool = False

    def as_json(self) -> dict[str, Any]:
        """Returns the plan's fields. Each tile also has its kind."""
        up, down = ({"kind": _kind_of(tile), **asdict(tile)} for tile in (self.up, self.down))
        return {"kernel": self.kernel, "up": up, "down": down, "expand": self.expand}

    @classmethod
    def from_json(cls, data: Any) -> ExpertsPlan:
        """See `plans.Plan`."""
        if data["kernel"] not in ("gemv", "grouped"):
            raise ValueError(f"unknown kernel {data['kernel']!r}")
        up, down = _tile(data["up"]), _tile(data["down"])
        return cls(data["kernel"], up, down, bool(data["expand"]))


_KINDS: dict[str, type[AnyTile]] = {
    "loop": Tile, "mma": MmaTile, "integer": IntegerTile, "ring": RingTile
}  # fmt: skip


def _kind_of(tile: AnyTile) -> str:
    return next(kind for kind, known in _KINDS.items() if type(tile) is known)


def _tile(data: Any) -> AnyTile:
    values = dict(data)
    tile = _KINDS[values.pop("kind")](**values)
    if not all(isinstance(value, int) for value in astuple(tile)):
        raise TypeError(f"a tile has a value that is not a number: {data}")
    return tile


class ExpertsShape(NamedTuple):
    """The shape by which a plan is chosen.

    Attributes:
        tokens: number of tokens.
        experts: number of experts of all ranks.
        top_k: number of experts of a token.
        hidden: inputs of an expert.
        width: hidden units of an expert on this rank.
        dtype: dtype of x.
        bits: bits of a stored weight.
        mma: `mma` supports the weights on this card.
        expand: see `expands`.
        floats: weights are stored as floats.
        ring: `hopper_experts` supports the weights, or their expansion, on this card.
        shared: bytes of shared memory that a program may use.
        format: key of the weights' format; "" chooses by rules without measured plans.
        counts: `integer` supports the weights on this card.
    """

    tokens: int
    experts: int
    top_k: int
    hidden: int
    width: int
    dtype: torch.dtype
    bits: int
    mma: bool = False
    expand: bool = False
    floats: bool = False
    ring: bool = False
    shared: int = 227 << 10
    format: str = ""
    counts: bool = False

    @property
    def mean(self) -> float:
        """The mean number of tokens per chosen expert, if tokens choose experts evenly."""
        taken = self.experts * (1 - (1 - 1 / self.experts) ** (self.tokens * self.top_k))
        return self.tokens * self.top_k / max(taken, 1.0)


def bits_of(format: WeightFormat) -> int:
    return format.bits or 8 * format.values.itemsize


PIECE = 256
"""Inputs that a warp of an `IntegerTile` requests at once."""
_SMALL_GRID = 128
"""Number of programs of 16 warps that a card runs at once."""
_WHOLE_CARD = 1024
"""Number of programs that a card runs at once if they have 2 warps with 4 chunks in flight each."""
_ENOUGH = 6000
"""Number of programs of one warp that keep a card busy until the last ones end."""
_SHORT_ROW = 8 * CHUNK_WORDS * 32
"""Bits of a weight row that a single warp reads in 8 rounds."""
FIXED_UP = Tile(32, 32, 64, 4, 3)
FIXED_DOWN = Tile(32, 64, 64, 4, 3)
"""The same tiles for any shape, so that a token's result has the same bits in every batch."""


@functools.lru_cache(maxsize=4096)
def plan_for(shape: ExpertsShape) -> ExpertsPlan:
    """Returns the plan for a shape by rules."""
    if shape.counts and shape.tokens <= GEMV_TOKENS:
        return ExpertsPlan("gemv", *_integer_tiles(shape))
    found = _mma_plan(shape) if shape.mma else None
    if found is not None:
        return found
    if shape.tokens <= GEMV_TOKENS:
        return ExpertsPlan("gemv", _row_tile(shape, gated=True), _row_tile(shape, gated=False))
    wide = shape.dtype == torch.float32
    if shape.mean <= 24:
        # Reading the weights takes most of the time. These tiles keep many loads in flight for
        # any number of tokens.
        if wide or shape.bits < 8:
            bk, stages = (64, 3) if wide else (128, 4)
            up, down = Tile(16, 32, bk, 4, stages), Tile(16, 64, bk, 4, stages)
        else:
            swap = shape.bits >= 16
            up, down = Tile(16, 64, 128, 4, 3, swap), Tile(16, 128, 128, 4, 3, swap)
        return ExpertsPlan("grouped", up, down)
    if shape.ring and (shape.bits >= 16 or shape.expand):
        return ExpertsPlan("grouped", RingTile(), RingTile(), expand=shape.expand)
    if shape.mean <= 48 or wide:
        return ExpertsPlan("grouped", Tile(32, 64, 64, 4, 3), Tile(32, 128, 64, 4, 3))
    eight = shape.bits == 8
    roomy = shape.shared >= 200 << 10
    if shape.mean > 96 and eight and not shape.floats and roomy:
        return ExpertsPlan("grouped", Tile(64, 128, 64, 4, 4), Tile(64, 256, 64, 4, 4))
    if shape.mean <= 96 or eight:
        # As the left operand, 8-bit floats are multiplied from the registers in which they were
        # widened, while the next ones are widened. Integers gain nothing from this.
        swap = eight and shape.floats
        return ExpertsPlan("grouped", Tile(64, 64, 64, 4, 3, swap), Tile(64, 128, 64, 4, 3, swap))
    if shape.bits >= 16 or shape.expand:
        # The reads from L2 take most of the time, and a larger tile needs fewer of them.
        bm, stages = (128, 4) if roomy else (64, 3)
        up, down = Tile(bm, 128, 64, 8, stages), Tile(bm, 256, 64, 8, stages)
    else:
        up, down = Tile(128, 64, 64, 8, 3), Tile(128, 128, 64, 8, 3)
    return ExpertsPlan("grouped", up, down, expand=shape.expand)


def _integer_tiles(shape: ExpertsShape) -> tuple[IntegerTile, IntegerTile]:
    """Returns the tiles of both products. All pieces of a warp are in flight if registers
    suffice."""
    up = -(-shape.hidden // PIECE)
    most = 3 if shape.bits < 8 else 2
    warps = min(16, 1 << ((up - 1) // most).bit_length())
    # 8-bit floats need further registers, so only one piece is in flight.
    ahead = 1 if shape.floats else min(most, -(-up // warps))
    total = -(-shape.top_k * -(-shape.width // PIECE) // 8)
    few = shape.tokens * -(-shape.hidden // 16) <= _SMALL_GRID
    if shape.floats:
        down = IntegerTile(16 if few else 8, 1)
    elif shape.bits < 8 or few:
        # If not all pieces can be in flight, it is better to leave registers to other programs.
        down = IntegerTile(8, total if total <= 3 else 1)
    else:
        down = IntegerTile(8, min(total, 2))
    return IntegerTile(warps, ahead), down


def _mma_plan(shape: ExpertsShape) -> ExpertsPlan | None:
    """Returns the plan for few tokens per expert on tensor cores, or None for too many tokens."""
    if shape.tokens <= GEMV_TOKENS:
        return ExpertsPlan("gemv", _direct_tile(shape), _sum_tile(shape))
    if shape.bits >= 8 or shape.mean > 10:
        return None
    return ExpertsPlan("grouped", *_few_tiles(shape))


def _few_tiles(shape: ExpertsShape) -> tuple[MmaTile, MmaTile]:
    """Returns the tiles of both products of sorted tokens.

    A single warp does not wait for the sums of other warps, and two tiles of rows use the same
    loaded inputs. But a grid of few programs needs more warps."""
    blocks = shape.tokens * shape.top_k * (1 / shape.mean + 1 / 16)
    programs = blocks * -(-shape.width // 16)
    alone = MmaTile(2, 1, 1, 1, early=True)
    if programs >= _ENOUGH:
        return alone, alone
    up = MmaTile(1 if programs < _ENOUGH / 2 else 2, 1, 2, 1, early=True)
    return up, alone if shape.width * shape.bits <= _SHORT_ROW else up


def _direct_tile(shape: ExpertsShape) -> MmaTile:
    """Returns the tile for the units of one assignment."""
    if shape.bits >= 8:
        return MmaTile(1, 0, 4, 2)
    programs = shape.tokens * shape.top_k * -(-shape.width // 8)
    if programs <= _WHOLE_CARD:
        return MmaTile(1, 0, 2, 4, early=True)
    return MmaTile(1, 0, 2 if shape.hidden * shape.bits > 2 * _SHORT_ROW else 4, 1, early=True)


def _sum_tile(shape: ExpertsShape) -> MmaTile:
    """Returns the tile for the sum over a token's experts. It takes one round if the registers of
    the warps suffice."""
    chunks = -(-shape.top_k * shape.width * shape.bits // (CHUNK_WORDS * 32 * 8))
    if chunks <= 6:
        return MmaTile(1, 0, 8, chunks)
    programs = shape.tokens * -(-shape.hidden // 16)
    if programs <= _SMALL_GRID:
        return MmaTile(1, 0, 16, 2)
    return MmaTile(1, 0, 8, 3 if shape.bits < 8 else 2)


def _row_tile(shape: ExpertsShape, *, gated: bool) -> Tile:
    """Returns the tile of a GEMV: a few rows of weights, as long as registers allow.

    Rows of few bits are short, so more of them are in flight."""
    if gated:
        return Tile(1, 4, 512, 4, 3) if shape.bits >= 16 else Tile(1, 16, 256, 4, 3)
    if shape.bits >= 16:
        return Tile(1, 4, 512, 4)
    return Tile(1, 4, 1024 if shape.bits < 8 and shape.width >= 1024 else 256, 4)


# -- measured plans; without one, the rules above apply ----------------------------------------

RANGES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
"""The largest number of tokens of each range with its own plan. For more tokens, rules choose."""
Entries = dict[str, ExpertsPlan]
"""Measured plans by the `key_of` of their shapes."""

_used: Entries = {}
"""Plans that this process uses. The first rank decides for all ranks."""


def range_of(tokens: int) -> int | None:
    """Returns the upper end of the range that contains a number of tokens, or None."""
    return next((most for most in RANGES if tokens <= most), None)


def key_of(shape: ExpertsShape) -> str:
    """Returns the key of a shape, such as "bfloat16/t64/e128/k8/h2048/w768/uint4-g128".

    "t64" is the upper end of the range of tokens. The last parts name the kernels that support the
    shape."""
    dtype = str(shape.dtype).removeprefix("torch.")
    parts = [dtype, f"t{range_of(shape.tokens)}", f"e{shape.experts}", f"k{shape.top_k}"]
    parts += [f"h{shape.hidden}", f"w{shape.width}", shape.format]
    parts += ["mma"] if shape.mma else []
    parts += ["ring"] if shape.ring else []
    parts += ["integer"] if shape.counts else []
    parts += ["expand"] if shape.expand else []
    return "/".join(parts)


PLANS = Plans("experts", ExpertsPlan, key_of)
"""Measured plans of experts."""


@functools.lru_cache(maxsize=4096)
def chosen_plan(shape: ExpertsShape) -> ExpertsPlan:
    """Returns the measured plan for a shape, or the plan by rules."""
    found = _used.get(key_of(shape)) if shape.format else None
    return found or plan_for(shape)


def use(entries: Mapping[str, ExpertsPlan]) -> None:
    """Adds measured plans to the choices of this process."""
    _used.update(entries)
    chosen_plan.cache_clear()
