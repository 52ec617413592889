"""Matrix products of few rows, padded to the size of tensor cores.

Tiles are narrow in N, so that all multiprocessors take part in reading the weight. If N is too
small for that, programs share a tile's K (split-K). They store their partial sums in a workspace.
The last program to arrive adds them in order of K, so the result does not depend on the order of
arrival."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.launch import options, traits
from quire.ops.triton.products.common import (
    finish,
    gdc_launch_dependents,
    load_k,
    norm_weight,
    normalise,
    prefetch_rows,
    tile_rows,
    wait_for_predecessor,
)
from quire.ops.triton.products.plan import GemmPlan, Launch, LinearArgs
from quire.ops.triton.products.quantized_tiles import (
    LIFT,
    Operands,
    load_groups,
    load_tile,
    widen,
    widen_pairs,
)

MAX_SPLIT_TILES = 16384


@dataclass(frozen=True, slots=True)
class Workspace:
    """Arrival counters of split-K tiles: int32 [MAX_SPLIT_TILES], zero between kernels.

    Kernels of one stream may share it. Streams that run at the same time need one each."""

    counters: Tensor

    @classmethod
    def allocate(cls, device: torch.device) -> Workspace:
        return cls(torch.zeros(MAX_SPLIT_TILES, dtype=torch.int32, device=device))


@triton.jit
def _row_scales(x_ptrs, K, eps, BM: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr):
    """Returns 1 / RMS of rows, [BM]. x_ptrs [BM, 1] points to the starts of the rows."""
    ks = tl.arange(0, BK)[None, :]
    squares = tl.zeros([BM, BK], tl.float32)
    for k in range(0, K, BK):
        x = load_k(x_ptrs + k + ks, k + ks, K, EVEN_K).to(tl.float32)
        squares += x * x
    return tl.rsqrt(tl.sum(squares, 1) / K + eps)


@triton.jit
def product(
    x_ptrs, w_ptrs, s_ptrs, z_ptrs, g_ptr, scale, k_begin, k_end, K, eps,
    BM: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr,
    NORM: tl.constexpr, SWAP: tl.constexpr, UPCAST: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, E2M1: tl.constexpr = False,
    IN_PAIRS: tl.constexpr = False, TURN: tl.constexpr = True, live=None,
):  # fmt: skip
    """Returns fp32 sums over [k_begin, k_end), [BM, R]. With SWAP and without TURN it is [R, BM].

    Args:
        x_ptrs: [BM, 1].
        w_ptrs: [R, 1].
        s_ptrs: [R, 1].
        z_ptrs: [R, 1].
        live: mask of the rows of x to read, [BM, 1]. None reads all.
    """
    ks = tl.arange(0, BK)
    dtype: tl.constexpr = x_ptrs.dtype.element_ty
    acc = tl.zeros([R, BM] if SWAP else [BM, R], tl.float32)
    squares = tl.zeros([BM], tl.float32)
    for k0 in range(k_begin, k_end, BK):
        k = k0 + ks
        if live is None:
            x = load_k(x_ptrs + k[None, :], k[None, :], K, EVEN_K)
        elif EVEN_K:
            x = tl.load(x_ptrs + k[None, :], mask=live, other=0.0)
        else:
            x = tl.load(x_ptrs + k[None, :], mask=live & (k < K)[None, :], other=0.0)
        w = load_tile(w_ptrs, k0, K, BK, BITS, EVEN_K)
        if BITS == 4 or GROUP > 0 or HAS_ZEROS:
            s = 1.0
            z = 0.0
            if GROUP > 0:
                s = load_groups(s_ptrs, k0, K, BK, GROUP, EVEN_K)
            if HAS_ZEROS:
                z = load_groups(z_ptrs, k0, K, BK, GROUP, EVEN_K)
            if IN_PAIRS:
                w = widen_pairs(w, s, R, BK, GROUP)
            else:
                w = widen(w, s, z, R, BK, BITS, GROUP, HAS_ZEROS, E2M1)
            if E2M1 and dtype == tl.float16:
                w *= LIFT
        if NORM == "exact":
            g = norm_weight(g_ptr, k, K, EVEN_K)
            x = normalise(
                x.to(tl.float32), scale[:, None], g[None, :], dtype, g_ptr.dtype.element_ty
            ).to(dtype)
        elif NORM == "late":
            xf = x.to(tl.float32)
            squares += tl.sum(xf * xf, 1)
            x = (xf * norm_weight(g_ptr, k, K, EVEN_K)[None, :]).to(dtype)
        if UPCAST:
            x = x.to(tl.float32)
        w = w.to(x.dtype)  # Exact without groups, because every dtype of x holds 8 bits.
        if SWAP:
            acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    if E2M1 and dtype != tl.float16:
        acc *= LIFT
    if SWAP and TURN:
        acc = tl.trans(acc)
    if NORM == "late":
        acc *= tl.rsqrt(squares / K + eps)[:, None]
    return acc


@triton.jit
def store_tile(
    acc, w_scale_ptr, bias_ptr, res_ptr, y_ptr, rows, ms, cols, M, N, stride_sn, stride_rm,
    stride_ym, GLU: tl.constexpr, ACT: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RES: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Computes the epilogue of a tile of fp32 sums [BM, R].

    It applies the scales of weight rows, bias, activation and residual, and stores the result."""
    if HAS_SCALES:
        acc *= tl.load(w_scale_ptr + rows * stride_sn).to(tl.float32)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + rows).to(tl.float32)[None, :]
    m64 = ms.to(tl.int64)[:, None]
    if APART:
        at = y_ptr + m64 * stride_ym + rows[None, :]
        tl.store(at, acc.to(y_ptr.dtype.element_ty), mask=(ms < M)[:, None])
    else:
        y = finish(acc, [ms.shape[0], cols.shape[0], 2], GLU, ACT)
        mask = (ms < M)[:, None] & (cols < N)[None, :]
        if HAS_RES:
            added = tl.load(res_ptr + m64 * stride_rm + cols[None, :], mask=mask, other=0.0)
            y += added.to(tl.float32)
        tl.store(y_ptr + m64 * stride_ym + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sum_of_parts(parts_ptr, offsets, parts, PART: tl.constexpr):
    """Returns the sum of the parts. Loads bypass L1, which does not see other programs' writes."""
    total = tl.load(parts_ptr + offsets, cache_modifier=".cg")
    for s in range(1, parts):
        total += tl.load(parts_ptr + s * PART + offsets, cache_modifier=".cg")
    return total


@triton.jit
def reduce_split_k(
    acc, parts_ptr, counters_ptr, tile, part, parts, BM: tl.constexpr, R: tl.constexpr
):
    """Returns a tile's sum [BM, R] over its programs, and whether it is complete.

    Only the last program to arrive has the complete sum. `part` is the index of this program's part
    of `parts`."""
    parts_ptr += tile.to(tl.int64) * parts * BM * R
    offsets = tl.arange(0, BM)[:, None] * R + tl.arange(0, R)[None, :]
    tl.store(parts_ptr + part * BM * R + offsets, acc)
    tl.debug_barrier()  # Every thread's part is written before the one atomic that signals it.
    last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == parts - 1
    if last:
        acc = _sum_of_parts(parts_ptr, offsets, parts, BM * R)
        tl.store(counters_ptr + tile, 0)
    return acc, last


@triton.jit(do_not_specialize=["M", "prefetch_k", "steps_per_split"])
def skinny_kernel(
    x_ptr, w_ptr, w_scale_ptr, w_zero_ptr, bias_ptr, res_ptr, g_ptr, y_ptr, parts_ptr,
    counters_ptr, M, N, K, stride_xm, stride_wn, stride_sn, stride_rm, stride_ym, eps,
    steps_per_split, prefetch_k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    SWAP: tl.constexpr, EVEN_K: tl.constexpr, GLU: tl.constexpr, ACT: tl.constexpr,
    NORM: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RES: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, APART: tl.constexpr,
    UPCAST: tl.constexpr, PDL: tl.constexpr, EAGER: tl.constexpr, PREFETCH: tl.constexpr,
    IN_PAIRS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Computes y [M, N] of x [M, K] and w [N, K] (gated: [2 N, K]). Grid: N tiles, K splits, M
    tiles.

    For w, w_scale_ptr and w_zero_ptr see `Operands`."""
    if PDL and EAGER:
        gdc_launch_dependents()
    R: tl.constexpr = 2 * BN if GLU else BN
    pid_n, pid_k, pid_m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = tile_rows(pid_n, N, BN, GLU)
    cols = pid_n * BN + tl.arange(0, BN)
    ms = pid_m * BM + tl.arange(0, BM)
    k_begin = pid_k * steps_per_split * BK
    k_end = tl.minimum(K, k_begin + steps_per_split * BK)
    if PREFETCH:
        STEP: tl.constexpr = 8 if BITS == 4 else 1
        first = k_begin // STEP
        prefetch_rows(w_ptr, rows, stride_wn, first, tl.minimum(k_end // STEP, first + prefetch_k))
    if PDL:
        wait_for_predecessor(EAGER)
    x_ptrs = x_ptr + tl.minimum(ms, M - 1).to(tl.int64)[:, None] * stride_xm
    w_ptrs = w_ptr + rows.to(tl.int64)[:, None] * stride_wn
    s_ptrs = w_scale_ptr + rows.to(tl.int64)[:, None] * stride_sn
    z_ptrs = w_zero_ptr + rows.to(tl.int64)[:, None] * stride_sn
    scale = tl.full([BM], 1.0, tl.float32)
    if NORM == "exact":
        scale = _row_scales(x_ptrs, K, eps, BM, BK, EVEN_K)
    acc = product(
        x_ptrs, w_ptrs, s_ptrs, z_ptrs, g_ptr, scale, k_begin, k_end, K, eps, BM, R, BK, EVEN_K,
        NORM, SWAP, UPCAST, BITS, GROUP, HAS_ZEROS, False, IN_PAIRS, True,
        (ms < M)[:, None] if MASKED else None,
    )  # fmt: skip
    last = True
    if SPLIT:
        tile = pid_m * tl.num_programs(0) + pid_n
        acc, last = reduce_split_k(
            acc, parts_ptr, counters_ptr, tile, pid_k, tl.num_programs(1), BM, R
        )  # fmt: skip
    if last:
        store_tile(
            acc, w_scale_ptr, bias_ptr, res_ptr, y_ptr, rows, ms, cols, M, N, stride_sn, stride_rm,
            stride_ym, GLU, ACT, HAS_SCALES, HAS_BIAS, HAS_RES, APART,
        )  # fmt: skip


def unpacks_pairs(args: LinearArgs, own: Operands) -> bool:
    """Whether values are unpacked as pairs of bf16. With bf16 scales this loses no precision."""
    plain = own.bits == 4 and not (own.has_zeros or own.e2m1) and own.group > 0
    of_pairs = args.x.dtype == own.scales.dtype == torch.bfloat16
    return plain and of_pairs and traits(args.x.device).capability >= (9, 0)


def skinny_gemm(
    args: LinearArgs, out: Tensor, plan: GemmPlan, workspace: Workspace, *, pdl: bool
) -> Launch:
    """Returns the launch that writes the layer `args` to `out` [M, N]. `plan.norm` is not
    "separate"."""
    m, k, n = args.x.shape[0], args.k, args.n
    x, own, res, norm = args.x, Operands(args.weight), args.residual, args.norm
    w = own.values
    norm_mode = "none" if norm is None else plan.norm
    steps = triton.cdiv(k, plan.bk)
    per_split = triton.cdiv(steps, plan.split_k)
    split_k = triton.cdiv(steps, per_split)
    tiles = triton.cdiv(n, plan.bn), triton.cdiv(m, plan.bm)
    parts = workspace.counters
    if split_k > 1:
        if norm_mode == "late":
            norm_mode = "exact"  # A program with a part of K does not see all squares of a row.
        tile = plan.bm * plan.bn * (2 if args.gated else 1)
        size = tiles[0] * tiles[1] * split_k * tile
        parts = torch.empty(size, dtype=torch.float32, device=x.device)
    prefetch_k = plan.prefetch // w.element_size()
    operands = (
        x, w, own.scales, own.zeros, x if args.bias is None else args.bias,
        x if res is None else res, x if norm is None else norm.weight, out, parts,
        workspace.counters, m, n, k,
        x.stride(0), w.stride(0), own.scales.stride(0), 0 if res is None else res.stride(0),
        out.stride(0), 0.0 if norm is None else norm.eps, per_split, prefetch_k,
    )  # fmt: skip
    named = options(
        pdl, BM=plan.bm, BN=plan.bn, BK=plan.bk, SPLIT=split_k > 1, SWAP=plan.swap,
        EVEN_K=k % plan.bk == 0, GLU=args.gated, ACT=args.act_name,
        NORM=norm_mode,
        HAS_SCALES=own.has_scales, HAS_BIAS=args.bias is not None, HAS_RES=res is not None,
        BITS=own.bits, GROUP=own.group, HAS_ZEROS=own.has_zeros, APART=args.apart,
        UPCAST=x.dtype == torch.bfloat16 and not traits(x.device).bf16,
        PDL=pdl, EAGER=plan.eager, PREFETCH=pdl, IN_PAIRS=unpacks_pairs(args, own),
        MASKED=plan.masked, num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    return Launch(skinny_kernel, (tiles[0], split_k, tiles[1]), operands, named)
