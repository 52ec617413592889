"""Chooses the kernel and the tile of a linear layer by a measured table of the card, or by rules.

`tune.py` measures the entries of tables."""

from __future__ import annotations

import importlib.resources
from dataclasses import dataclass, field

import torch
import triton

from quire.ops.triton.launch import DeviceTraits
from quire.ops.triton.products.plan import (
    INTEGER_BYTES,
    INTEGER_INPUTS,
    MMA_ROWS,
    TORCH,
    GemmPlan,
    NormMode,
    Shape,
    chunk_inputs,
    counts,
    integer_bytes,
    integer_resident,
    multiplies,
    norms_late,
    stored_bits,
)
from quire.ops.triton.products.plans import Plans

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of rows in a table. A number between two of them uses the plan of the larger one."""
HEURISTIC_MAX_M = 64
"""Without a table entry, cuBLAS computes layers with more rows than this."""


def bucket(m: int) -> int | None:
    """Returns the smallest number of rows in a table that is at least m, or None."""
    return next((size for size in BUCKETS if m <= size), None)


def key_of(shape: Shape) -> str:
    """Returns the key of a shape, such as "bfloat16/m1/n4096/k1024/norm".

    m is rounded up to its bucket. For a weight with scales the format comes last:
    "bfloat16/m1/n4096/k1024/norm/int8"."""
    parts = [str(shape.dtype).removeprefix("torch."), f"m{bucket(shape.m)}"]
    parts += [f"n{shape.n}", f"k{shape.k}"]
    parts += ["norm"] if shape.norm else []
    parts += ["gated"] if shape.gated else []
    parts += [shape.format.key] if shape.format is not None else []
    return "/".join(parts)


PLANS = Plans(
    "gemm", GemmPlan, key_of, importlib.resources.files("quire.ops.triton.products") / "gemm_tables"
)
"""Measured plans of linear layers."""


@dataclass(slots=True)
class Chosen:
    """The layers for which this process chose plans, with rows rounded up to buckets.

    Attributes:
        measured: keys of layers whose plan is from a table.
        by_rules: shapes of layers whose plan is by rules, by key.
    """

    measured: set[str] = field(default_factory=set)
    by_rules: dict[str, Shape] = field(default_factory=dict)


chosen = Chosen()


def _power_of_two(value: float, low: int, high: int) -> int:
    """Returns the largest power of two that is at most `value`, clamped to [low, high]."""
    result = low
    while result * 2 <= min(value, high):
        result *= 2
    return result


_GEMV_INPUTS = 4096
"""Up to this many inputs a program of a GEMV has whole rows in registers."""
_SMALL_BYTES = 8 << 20
"""Up to this many bytes of a 16-bit weight, `skinny` computes 64 rows instead of cuBLAS."""
_GATED_BYTES = 256 << 20
"""Up to this many bytes of a gated 16-bit weight, `skinny` computes 32 and 64 rows."""


def _gemv_plan(shape: Shape, sms: int) -> GemmPlan:
    rows = shape.n * (2 if shape.gated else 1)
    whole = triton.next_power_of_2(shape.k)
    if _unpacks(shape):
        # Unpacked values need registers. The words of such a short piece of a row still fill a line
        # of memory.
        bk, warps = min(max(whole, 64), 1024), 4 if whole >= 1024 else 2
    elif whole <= _GEMV_INPUTS:
        bk, warps = max(whole, 32), _power_of_two(whole / 512, 1, 8)
    else:
        bk, warps = 1024, 4
    tile_rows = _power_of_two(rows / (4 * sms), 2, 4 if shape.m == 1 else 2)
    # In a grid slightly larger than one wave, the last programs run while most of the card is idle.
    tail = 8 * sms < triton.cdiv(rows, tile_rows) <= 16 * sms
    stages = 4 if tail and whole > _GEMV_INPUTS and shape.m == 1 and not _unpacks(shape) else 1
    mode: NormMode = "late" if shape.m == 1 and shape.format is None else "exact"
    return GemmPlan(
        "gemv", bm=triton.next_power_of_2(shape.m), bn=tile_rows // (2 if shape.gated else 1),
        bk=bk, warps=warps, stages=stages, norm=mode if shape.norm else "none",
        prefetch=4 * bk if stages == 1 else 0,
    )  # fmt: skip


_MMA_BYTES, _MMA_INPUT_BYTES = 48 << 20, 24 << 10
"""Up to this many bytes of a 16-bit weight, and of x, few rows go to `mma_gemv`. Each program reads
all of x, and kernels that need shared memory leave little L1 for it."""


def _plain_mma_plan(shape: Shape) -> GemmPlan:
    inputs, outputs = chunk_inputs(16), 8 if shape.gated else 16
    chunks = triton.cdiv(shape.k, inputs)
    # A short row is in flight as a whole, in the fewest warps that can hold it.
    warps = 4 if chunks <= 32 else 8 if chunks <= 64 else 16
    stages = triton.cdiv(chunks, warps) if chunks <= 96 else 2
    return GemmPlan(
        "mma", bm=8, bn=outputs, bk=inputs, warps=warps, stages=stages,
        norm=("late" if norms_late(shape) else "separate") if shape.norm else "none",
    )  # fmt: skip


def _mma_plan(shape: Shape, sms: int) -> GemmPlan:
    bits = stored_bits(shape.format)
    inputs, outputs = chunk_inputs(bits), 8 if shape.gated else 16
    chunks = shape.k // inputs
    # If not all programs fit at once, few warps with few registers leave room for more programs.
    wide = triton.cdiv(shape.n, outputs) > 4 * sms
    warps = 4 if wide or bits == 4 else 8
    turns = triton.cdiv(chunks, warps)
    # A short row is in flight as a whole.
    stages = turns if turns <= 8 and not (wide and bits == 8) else 2
    if chunks % (warps * stages):
        # A long turn that is not full costs less than many short turns.
        warps = 16 if bits == 8 and chunks > 64 else warps
        stages = min(8, max(1, chunks // warps))
    return GemmPlan(
        "mma", bm=8, bn=outputs, bk=inputs, warps=warps, stages=stages,
        norm="separate" if shape.norm else "none",
    )  # fmt: skip


def _integer_plan(shape: Shape, sms: int) -> GemmPlan | None:
    """Returns a plan of "integer" for one row, or None if another kernel is faster.

    It has the fewest segments that registers allow, then the fewest missing chunks, then about six
    chunks per warp."""
    chunks, outputs = shape.k // INTEGER_INPUTS, 8 if shape.gated else 16
    tiles = triton.cdiv(shape.n, outputs)
    bits = shape.format.bits if shape.format else 0
    # With 8 bits, segments cost more time than "integer" saves.
    for segments in (1, 2, 3, 4) if bits == 4 else (1,):
        shares = []
        for order, warps in enumerate((4, 8, 2, 16, 1)):
            count = triton.cdiv(chunks, warps * segments)
            resident = integer_resident(shape, warps, count)
            if resident:
                missing = warps * segments * count - chunks
                shares.append((missing, abs(count - 6), order, warps, count, resident))
        for _, _, _, warps, count, resident in sorted(shares):
            # If not all programs fit at once, each takes several tiles and reads the next
            # tile during the current one. This is not needed for long rows of bytes, which
            # have enough loads in flight anyway.
            turns = tiles > 4 * sms and (bits == 4 or chunks < 32)
            turns = turns or segments > 1 or (bits == 4 and resident == 1)
            plan = GemmPlan(
                "integer", bm=4, bn=outputs, bk=INTEGER_INPUTS, warps=warps, stages=count,
                programs=min(3, resident) * sms if turns else 0,
                norm=("late" if norms_late(shape) else "separate") if shape.norm else "none",
            )  # fmt: skip
            if integer_bytes(shape, plan) <= INTEGER_BYTES:
                return plan
    return None


def _unpacks(shape: Shape) -> bool:
    return shape.format is not None and (shape.format.bits > 0 or shape.format.group > 0)


def _skinny_plan(shape: Shape, sms: int) -> GemmPlan:
    bm = min(128, max(16, triton.next_power_of_2(shape.m)))
    rows = shape.n * (2 if shape.gated else 1)
    bk = 128 if shape.k >= 128 and shape.dtype.itemsize <= 2 else 64
    # Larger tiles unpack a weight once for more rows of x.
    tile_rows = _power_of_two(rows / (2 * sms), 32 if shape.format is None else 64, 64)
    tiles = triton.cdiv(rows, tile_rows)
    split_k = _power_of_two(min(2 * sms / tiles, shape.k / (4 * bk)), 1, 8)
    return GemmPlan(
        "skinny", bm=bm, bn=tile_rows // (2 if shape.gated else 1), bk=bk, warps=4,
        stages=4 if bm <= 32 else 3, split_k=split_k, norm="separate" if shape.norm else "none",
        prefetch=1024, swap=shape.format is not None and bm <= 64,
    )  # fmt: skip


def _hopper_plan(shape: Shape, sms: int) -> GemmPlan | None:
    """Returns a plan for 17 to 64 rows of 16 bits on sm_90 and newer, or None to use the general
    rules."""
    bm = max(16, triton.next_power_of_2(shape.m))
    if shape.format is not None or shape.dtype.itemsize != 2 or bm not in (32, 64):
        return None
    if not shape.gated:
        # cuBLAS was a fifth faster, except for the smallest layers.
        return TORCH if bm == 64 and shape.weight_bytes > _SMALL_BYTES else None
    tiles = triton.cdiv(shape.n, 32)
    if shape.weight_bytes > _GATED_BYTES or (bm == 64 and tiles < sms):
        return None
    # Two programs run at once on a multiprocessor. If small tiles give fewer programs, larger tiles
    # are used.
    wide = bm == 64 and tiles > 2 * sms
    return GemmPlan(
        "skinny", bm=bm, bn=64 if wide else 32, bk=64, warps=4, stages=4 if wide else 5,
        swap=bm == 32, norm="separate" if shape.norm else "none",
    )  # fmt: skip


def heuristic(shape: Shape, traits: DeviceTraits) -> GemmPlan:
    """Returns a plan by rules, for shapes without a table entry.

    cuBLAS computes large weights with many rows, for which it is nearly optimal. It also computes
    dtypes that the card's tensor cores do not support, except for the few rows of a GEMV."""
    if shape.m == 1 and counts(shape) and traits.capability >= (9, 0):
        plan = _integer_plan(shape, traits.num_sms)
        if plan is not None:
            return plan
    if multiplies(shape) and traits.capability >= (8, 0):
        if shape.format is not None:
            return _mma_plan(shape, traits.num_sms)
        few_inputs = 2 * shape.m * shape.k <= _MMA_INPUT_BYTES
        if 1 < shape.m <= MMA_ROWS and few_inputs and shape.weight_bytes <= _MMA_BYTES:
            return _plain_mma_plan(shape)
    slow = shape.dtype == (torch.float32 if traits.bf16 else torch.bfloat16)
    # With long rows, a GEMV has no registers for more than two rows of x.
    if shape.m <= (2 if shape.k > _GEMV_INPUTS and not (slow or _unpacks(shape)) else 4):
        return _gemv_plan(shape, traits.num_sms)
    if _unpacks(shape):
        # Dequantizing the whole weight would write it in 16 bits and read it once more.
        return (
            TORCH
            if shape.dtype == torch.float32 and traits.bf16
            else _skinny_plan(shape, traits.num_sms)
        )
    if traits.capability >= (9, 0) and (plan := _hopper_plan(shape, traits.num_sms)) is not None:
        return plan
    big = shape.m > 16 and shape.weight_bytes > (96 << 20)
    if shape.m > HEURISTIC_MAX_M or big or slow:
        return TORCH
    return _skinny_plan(shape, traits.num_sms)


def fixed_plan(shape: Shape) -> GemmPlan:
    """Returns the plan of `--deterministic`.

    Its tile and its order of sums do not depend on the number of rows. So a row's result does not
    depend on the rest of the batch."""
    return GemmPlan(
        "skinny", bm=64, bn=32 if shape.gated else 64, bk=64, warps=4, stages=3,
        norm="separate" if shape.norm else "none",
    )  # fmt: skip


def rows_plan(shape: Shape, card: DeviceTraits) -> GemmPlan:
    """Returns the plan of `--deterministic` for a layer without adapters.

    On Hopper cards the tensor cores sum along K to the same bits in tiles of any size. So the tile
    depends on the number of rows. Weights with scales always use one tile, because int8 results
    differed between tiles."""
    if card.capability != (9, 0) or shape.dtype.itemsize != 2 or shape.format is not None:
        return fixed_plan(shape)
    stacked = 2 if shape.gated else 1
    few = triton.cdiv(shape.n * stacked, 64) <= card.num_sms
    # A tile lists rows, outputs, inputs of a step, steps in flight, warps, and whether weights
    # are the left operand.
    if shape.m <= 16:
        tile = (16, 64, 128, 6 if few else 4, 4, True)
    elif shape.m <= 32:
        tile = (32, 64, 128, 4, 4, True)
    elif shape.m <= 64:
        tile = (64, 32, 128, 4, 4, False) if few else (64, 64, 128, 3, 4, True)
    elif shape.m <= 128:
        tile = (64, 64, 64, 5, 4, True) if few else (128, 64, 64, 4, 4, True)
    elif shape.m <= 512:
        tile = (128, 128, 64, 4, 4, False)
    else:
        tile = (256, 128, 64, 3, 8, True)
    bm, outputs, bk, stages, warps, swap = tile
    return GemmPlan(
        "skinny", bm=bm, bn=outputs // stacked, bk=bk, warps=warps, stages=stages, swap=swap,
        norm="separate" if shape.norm else "none", prefetch=1024, masked=shape.m < bm,
    )  # fmt: skip


def _takes(plan: GemmPlan, shape: Shape) -> bool:
    """Whether a plan's kernel supports a shape. The key does not contain all that it depends on."""
    if plan.kernel == "integer":
        return counts(shape) and integer_bytes(shape, plan) <= INTEGER_BYTES
    return plan.kernel != "mma" or shape.aligned


def plan_for(shape: Shape, card: str, traits: DeviceTraits) -> GemmPlan:
    """Returns the table's plan for a shape, with m rounded up to its bucket, or the heuristic's.

    `chosen` records which of the two it was."""
    rows = bucket(shape.m)
    if rows is None:
        return TORCH
    key, entries = key_of(shape), PLANS.entries(card)
    if key not in entries and (behind_norm := key_of(shape._replace(norm=True))) in entries:
        # If the norm was fused with a sum over ranks, the layer gets x without a norm. A table may
        # have the same layer with the norm.
        key = behind_norm
    plan = entries.get(key)
    if plan is None:
        chosen.by_rules[key] = shape._replace(m=rows)
    else:
        chosen.measured.add(key)
        if _takes(plan, shape):
            return plan
    return heuristic(shape, traits)
