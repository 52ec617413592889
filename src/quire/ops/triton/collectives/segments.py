"""Products whose inputs are summed by segments, and the sum of segments in pairs.

A program computes all segments of its tile. Each segment runs the same loop over its own inputs.
The sums of segments are added in registers, in pairs of neighbours. So a single rank adds in the
same order as several ranks. The compiler must not fuse a product with the addition after it,
because several ranks round between the two."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.reference.quantized import dequantize
from quire.ops.triton.launch import launch, options, traits
from quire.ops.triton.linear import loads
from quire.ops.triton.products.common import (
    gdc_launch_dependents,
    prefetch_rows,
    tile_rows,
    wait_for_predecessor,
)
from quire.ops.triton.products.plan import LinearArgs
from quire.ops.triton.products.quantized_tiles import Operands
from quire.ops.triton.products.round_inputs import round_inputs
from quire.ops.triton.products.skinny import product, store_tile, unpacks_pairs
from quire.ops.triton.products.small import default_workspace
from quire.ops.weight import Weight


@triton.jit
def _add_segment(total, part, one, two, four):
    """Adds the sum of segment `part` to the sums of its neighbours, in pairs.

    Returns the sums that still wait for a neighbour: of one segment, of two and of four."""
    if part % 2 == 0:
        one = total
    elif part % 4 == 1:
        two = one + total
    else:
        four = two + (one + total)
    return one, two, four


@triton.jit
def _total(total, one, two, four, PARTS: tl.constexpr):
    """Returns the sum of all segments. `total` is the sum of the last segment."""
    if PARTS > 1:
        total = one + total
    if PARTS > 2:
        total = two + total
    if PARTS > 4:
        total = four + total
    return total


@triton.jit
def _sum_of_programs(parts_ptr, offsets, live, PROGRAMS: tl.constexpr, PART: tl.constexpr):
    """Returns the sum over a tile's programs, of the sums that they stored, added in pairs.

    Loads bypass L1, which does not see other programs' writes. `live` masks the rows."""
    total = tl.load(parts_ptr + offsets, mask=live, cache_modifier=".cg")
    one, two, four = total, total, total
    for part in tl.static_range(1, PROGRAMS):
        one, two, four = _add_segment(total, part - 1, one, two, four)
        total = tl.load(parts_ptr + part * PART + offsets, mask=live, cache_modifier=".cg")
    return _total(total, one, two, four, PROGRAMS)


@triton.jit(do_not_specialize=["M"])
def _sum_kernel(
    x_ptr, w_ptr, w_scale_ptr, w_zero_ptr, bias_ptr, res_ptr, y_ptr, parts_ptr, counters_ptr,
    M, N, size, stride_xm, stride_wn, stride_sn, stride_rm, stride_ym,
    PARTS: tl.constexpr, PROGRAMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, SWAP: tl.constexpr, FLAT: tl.constexpr, EVEN: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RES: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, UPCAST: tl.constexpr, IN_PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Computes y [M, N] of x [M, PARTS * size] and w [N, PARTS * size], see `Operands`.

    Grid: N tiles, PROGRAMS of each tile, M tiles."""
    EACH: tl.constexpr = PARTS // PROGRAMS
    pid_n, pid_k, pid_m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = tile_rows(pid_n, N, BN, False)
    if PDL:
        gdc_launch_dependents()
        if BITS != 4:
            prefetch_rows(w_ptr, rows, stride_wn, pid_k * EACH * size, (pid_k * EACH + 1) * size)
        wait_for_predecessor(True)
    cols = pid_n * BN + tl.arange(0, BN)
    ms = pid_m * BM + tl.arange(0, BM)
    x_ptrs = x_ptr + tl.minimum(ms, M - 1).to(tl.int64)[:, None] * stride_xm
    w_ptrs = w_ptr + rows.to(tl.int64)[:, None] * stride_wn
    s_ptrs = w_scale_ptr + rows.to(tl.int64)[:, None] * stride_sn
    z_ptrs = w_zero_ptr + rows.to(tl.int64)[:, None] * stride_sn
    none = tl.full([BM], 1.0, tl.float32)
    first = pid_k * EACH
    acc = tl.zeros([BN, BM] if SWAP else [BM, BN], tl.float32)
    one, two, four = acc, acc, acc
    if FLAT:
        steps = size // BK
        ks = first * size + tl.arange(0, BK)[None, :]
        for step in range(EACH * steps):
            if EACH > 1:
                if (step > 0) & (step % steps == 0):
                    one, two, four = _add_segment(acc, step // steps - 1, one, two, four)
                    acc = tl.zeros_like(acc)
            x = tl.load(x_ptrs + step * BK + ks)
            w = tl.load(w_ptrs + step * BK + ks)
            acc = tl.dot(w, tl.trans(x), acc) if SWAP else tl.dot(x, tl.trans(w), acc)
    else:
        for part in range(EACH):  # Not unrolled, because that would take long to compile.
            if EACH > 1:
                if part > 0:
                    one, two, four = _add_segment(acc, part - 1, one, two, four)
            begin = (first + part) * size
            acc = product(
                x_ptrs, w_ptrs, s_ptrs, z_ptrs, x_ptr, none, begin, begin + size, begin + size, 0.0,
                BM, BN, BK, EVEN, "none", SWAP, UPCAST, BITS, GROUP, HAS_ZEROS, False, IN_PAIRS,
                False,
            )  # fmt: skip
            if HAS_SCALES:
                scales = tl.load(w_scale_ptr + rows * stride_sn).to(tl.float32)
                acc *= scales[:, None] if SWAP else scales[None, :]
    total = _total(acc, one, two, four, EACH)
    if SWAP:
        total = tl.trans(total)
    last = True
    if PROGRAMS > 1:
        tile = pid_m * tl.num_programs(0) + pid_n
        own_ptr = parts_ptr + tile.to(tl.int64) * PROGRAMS * BM * BN
        offsets = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        live = (ms < M)[:, None]
        tl.store(own_ptr + pid_k * BM * BN + offsets, total, mask=live)
        tl.debug_barrier()  # Every thread's part is written before the one atomic that signals it.
        last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == PROGRAMS - 1
        if last:
            total = _sum_of_programs(own_ptr, offsets, live, PROGRAMS, BM * BN)
            tl.store(counters_ptr + tile, 0)
    if last:
        store_tile(
            total, w_scale_ptr, bias_ptr, res_ptr, y_ptr, rows, ms, cols, M, N, stride_sn,
            stride_rm, stride_ym, False, "", False, HAS_BIAS, HAS_RES, False,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SumPlan:
    """The tile of a program, and how its loop runs.

    Attributes:
        bm: rows of x.
        bn: outputs.
        bk: inputs of a step.
        programs: number of programs that share a tile's segments.
        swap: see `GemmPlan`.
        warps: see `GemmPlan`.
        stages: see `GemmPlan`.
        flat: one loop runs over the steps of all segments.
    """

    bm: int
    bn: int
    bk: int
    programs: int = 1
    swap: bool = False
    warps: int = 4
    stages: int = 3
    flat: bool = False


def segment_sum(
    x: Tensor, weight: Weight, segments: int, dtype: torch.dtype, bias: Tensor | None = None,
    residual: Tensor | None = None, *, plan: SumPlan | None = None,
) -> Tensor:  # fmt: skip
    """See `reference.segments.segment_sum`."""
    if weight.format.inputs != "none":
        x = round_inputs(x, weight)
    if weight.scales is not None and not loads(weight):
        weight = Weight.plain(dequantize(weight, x.dtype))
    m, n, size = len(x), weight.outputs, weight.inputs // segments
    out = torch.empty(m, n, dtype=dtype, device=x.device)
    if not m:
        return out
    card, own = traits(x.device), Operands(weight)
    if plan is None:
        follows = card.capability == (9, 0) and x.dtype.itemsize == 2 and weight.scales is None
        plan = _plan(m, n, size, segments, card.num_sms) if follows else _FIXED
    tiles = triton.cdiv(n, plan.bn), triton.cdiv(m, plan.bm)
    counters = default_workspace(x.device).counters
    parts = counters
    if plan.programs > 1:
        room = tiles[0] * tiles[1] * plan.programs * plan.bm * plan.bn
        parts = torch.empty(room, dtype=torch.float32, device=x.device)
    launch(_sum_kernel, (tiles[0], plan.programs, tiles[1]))(
        x, own.values, own.scales, own.zeros, x if bias is None else bias,
        x if residual is None else residual, out, parts, counters, m, n, size, x.stride(0),
        own.values.stride(0), own.scales.stride(0), 0 if residual is None else residual.stride(0),
        out.stride(0),
        PARTS=segments, PROGRAMS=plan.programs, BM=plan.bm, BN=plan.bn, BK=plan.bk, SWAP=plan.swap,
        FLAT=plan.flat and weight.scales is None and size % plan.bk == 0 and card.bf16,
        EVEN=size % plan.bk == 0, HAS_SCALES=own.has_scales,
        HAS_BIAS=bias is not None, HAS_RES=residual is not None, BITS=own.bits, GROUP=own.group,
        HAS_ZEROS=own.has_zeros, UPCAST=x.dtype == torch.bfloat16 and not card.bf16,
        IN_PAIRS=unpacks_pairs(LinearArgs(x, weight), own), PDL=card.pdl,
        **options(
            card.pdl, num_warps=plan.warps, num_stages=plan.stages, enable_fp_fusion=False
        ),
    )  # fmt: skip
    return out


_FIXED = SumPlan(64, 64, 64)


def _plan(m: int, n: int, size: int, segments: int, sms: int) -> SumPlan:
    """Returns the plan for `m` rows. The tile depends on the number of rows, see
    `table.rows_plan`."""
    if m > 512:
        if n < 2048:
            return SumPlan(64, 64, 64, swap=True, stages=4, flat=True)
        return SumPlan(64, 128, 64, warps=8, stages=4)
    if m > 256:
        return SumPlan(64, 64, 128, min(segments, 2), swap=True, stages=3)
    if m > 16:
        return SumPlan(32 if m <= 32 else 64, 64, 64, min(segments, 4), swap=True, stages=4)
    programs = 8
    while size > 512 and programs > 2 and programs * triton.cdiv(n, 64) >= 2 * sms:
        programs //= 2
    return SumPlan(16, 64, 128, min(segments, programs), True, 4, 3 if size <= 512 else 4)


@triton.jit
def _pairs_kernel(
    parts_ptr, bias_ptr, res_ptr, out_ptr, N, stride_p, stride_rm,
    PARTS: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Computes out [T, N] of parts [PARTS, T, N]. Grid: tokens, tiles of outputs."""
    if PDL:
        wait_for_predecessor(False)
    t, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BN + tl.arange(0, BN)
    mask = cols < N
    at = parts_ptr + t * N + cols
    total = tl.load(at, mask=mask, other=0.0)
    one, two, four = total, total, total
    for part in tl.static_range(1, PARTS):
        one, two, four = _add_segment(total, part - 1, one, two, four)
        total = tl.load(at + part * stride_p, mask=mask, other=0.0)
    total = _total(total, one, two, four, PARTS)
    if HAS_BIAS:
        total += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_RES:
        total += tl.load(res_ptr + t * stride_rm + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * N + cols, total.to(out_ptr.dtype.element_ty), mask=mask)


def add_pairs(
    parts: Tensor, dtype: torch.dtype, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """See `reference.segments.add_pairs`. There may be at most 8 parts."""
    count, tokens, n = parts.shape
    out = torch.empty(tokens, n, dtype=dtype, device=parts.device)
    if not tokens:
        return out
    bn, pdl = min(1024, triton.next_power_of_2(n)), traits(parts.device).pdl
    launch(_pairs_kernel, (tokens, triton.cdiv(n, bn)))(
        parts, parts if bias is None else bias, parts if residual is None else residual, out, n,
        parts.stride(0), 0 if residual is None else residual.stride(0),
        PARTS=count, BN=bn, HAS_BIAS=bias is not None, HAS_RES=residual is not None, PDL=pdl,
        **options(pdl, num_warps=4),
    )  # fmt: skip
    return out
