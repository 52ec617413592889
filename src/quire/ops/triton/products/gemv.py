"""GEMV of one to four rows: each program reads a few weight rows once.

At these sizes nearly all time is the read of the weights (Qwen3-0.6B: 1 to 3 µs per layer), so the
kernel must read without pauses. With programmatic dependent launch a program loads its first tile
into registers, and prefetches the rest into L2, before it waits for its predecessor. If a tile
spans all of K, only x is loaded after the wait. Longer rows take several tiles. The next tile is
loaded into registers (`stages` 1), or several tiles into shared memory."""

# Tuples that grow in a loop unrolled at compile time have no single type.
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.launch import options
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
from quire.ops.triton.products.quantized_tiles import Operands, load_groups, load_tile, widen


@triton.jit
def _row_scale(
    x_ptr, K, eps, BK: tl.constexpr, EVEN_K: tl.constexpr, SINGLE: tl.constexpr, NORM: tl.constexpr
):
    """Returns 1 / RMS of a row if the norm is "exact", so that it is needed before the products,
    else 1."""
    scale = 1.0
    if NORM == "exact":
        ks = tl.arange(0, BK)
        squares = tl.zeros([BK], tl.float32)
        for k in range(0, BK if SINGLE else K, BK):
            x = load_k(x_ptr + k + ks, k + ks, K, EVEN_K).to(tl.float32)
            squares += x * x
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    return scale


@triton.jit
def _add_products(
    acc, squares, w, x_ptr, k, K, scale, g, g_dtype: tl.constexpr, EVEN_K: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Returns acc [R, BK] + w [R, BK] * x [BK], and squares [BK] + x * x if the norm is "late"."""
    x = load_k(x_ptr + k, k, K, EVEN_K).to(tl.float32)
    if NORM == "exact":
        x = normalise(x, scale, g, x_ptr.dtype.element_ty, g_dtype)
    elif NORM == "late":
        squares += x * x
        x *= g
    return acc + w * x[None, :], squares


@triton.jit
def _load_residual(res_ptr, stride_rm, m, cols, M, N, HAS_RES: tl.constexpr):
    value = 0.0
    if HAS_RES:
        mask = cols < tl.where(m < M, N, 0)
        value = tl.load(res_ptr + m * stride_rm + cols, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def _store_row(
    acc, squares, w_scale, bias, residual, y_ptr, stride_ym, m, rows, cols, M, N, K, eps,
    BN: tl.constexpr, GLU: tl.constexpr, ACT: tl.constexpr, NORM: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    y = tl.sum(acc, 1)
    if NORM == "late":
        y *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
    y = y * w_scale + bias
    if APART:
        mask = rows < tl.where(m < M, 2 * N, 0)
        tl.store(y_ptr + m * stride_ym + rows, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        y = finish(y, [BN, 2], GLU, ACT) + residual
        mask = cols < tl.where(m < M, N, 0)
        tl.store(y_ptr + m * stride_ym + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "prefetch_k"])
def gemv_kernel(
    x_ptr, w_ptr, w_scale_ptr, w_zero_ptr, bias_ptr, res_ptr, g_ptr, y_ptr, M, N, K,
    stride_xm, stride_wn, stride_sn, stride_rm, stride_ym, eps, prefetch_k,
    MB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr,
    SINGLE: tl.constexpr, STAGES: tl.constexpr, GLU: tl.constexpr, ACT: tl.constexpr,
    NORM: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RES: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
    APART: tl.constexpr, PDL: tl.constexpr, EAGER: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Computes y [M, N] of x [M, K], M <= MB, and w [N, K] (gated: [2 N, K]), one tile of outputs
    per program.

    For w, w_scale_ptr and w_zero_ptr see `Operands`."""
    if PDL and EAGER:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    rows = tile_rows(pid, N, BN, GLU)
    cols = pid * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    R: tl.constexpr = 2 * BN if GLU else BN
    STEP: tl.constexpr = 8 if BITS == 4 else 1
    w_ptrs = w_ptr + rows.to(tl.int64)[:, None] * stride_wn
    s_ptrs = w_scale_ptr + rows.to(tl.int64)[:, None] * stride_sn
    z_ptrs = w_zero_ptr + rows.to(tl.int64)[:, None] * stride_sn
    s = 1.0
    z = 0.0
    if STAGES == 1:
        w = load_tile(w_ptrs, 0, K, BK, BITS, EVEN_K)
        if GROUP > 0:
            s = load_groups(s_ptrs, 0, K, BK, GROUP, EVEN_K)
        if HAS_ZEROS:
            z = load_groups(z_ptrs, 0, K, BK, GROUP, EVEN_K)
    w_scale = 1.0
    if HAS_SCALES:
        w_scale = tl.load(w_scale_ptr + rows * stride_sn).to(tl.float32)
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + rows).to(tl.float32)
    if PREFETCH:
        prefetch_rows(w_ptr, rows, stride_wn, 0 if STAGES > 1 else BK // STEP, prefetch_k)
    if PDL:
        wait_for_predecessor(EAGER)
    accs, squares, xs, scales, residuals = (), (), (), (), ()
    for m in tl.static_range(MB):
        xs = xs + (x_ptr + tl.minimum(m, M - 1) * stride_xm,)
        accs = accs + (tl.zeros([rows.shape[0], BK], tl.float32),)
        squares = squares + (tl.zeros([BK], tl.float32),)
        scales = scales + (_row_scale(xs[m], K, eps, BK, EVEN_K, SINGLE, NORM),)
        residuals = residuals + (_load_residual(res_ptr, stride_rm, m, cols, M, N, HAS_RES),)
    for k0 in tl.range(0, BK if SINGLE else K, BK, num_stages=STAGES):
        k = k0 + ks
        if STAGES > 1:
            w_now = load_tile(w_ptrs, k0, K, BK, BITS, EVEN_K)
            s_now = 1.0
            z_now = 0.0
            if GROUP > 0:
                s_now = load_groups(s_ptrs, k0, K, BK, GROUP, EVEN_K)
            if HAS_ZEROS:
                z_now = load_groups(z_ptrs, k0, K, BK, GROUP, EVEN_K)
        else:
            w_now = w
            s_now = s
            z_now = z
        wf = widen(w_now, s_now, z_now, R, BK, BITS, GROUP, HAS_ZEROS)
        if STAGES == 1 and not SINGLE:
            w = load_tile(w_ptrs, k0 + BK, K, BK, BITS, False)
            if GROUP > 0:
                s = load_groups(s_ptrs, k0 + BK, K, BK, GROUP, False)
            if HAS_ZEROS and GROUP > 0:
                z = load_groups(z_ptrs, k0 + BK, K, BK, GROUP, False)
        g = 1.0
        if NORM != "none":
            g = norm_weight(g_ptr, k, K, EVEN_K)
        new_accs = ()
        new_squares = ()
        for m in tl.static_range(MB):
            acc, sq = _add_products(
                accs[m], squares[m], wf, xs[m], k, K, scales[m], g, g_ptr.dtype.element_ty, EVEN_K,
                NORM,
            )  # fmt: skip
            new_accs = new_accs + (acc,)
            new_squares = new_squares + (sq,)
        accs = new_accs
        squares = new_squares
    for m in tl.static_range(MB):
        _store_row(
            accs[m], squares[m], w_scale, bias, residuals[m], y_ptr, stride_ym, m, rows, cols, M,
            N, K, eps, BN, GLU, ACT, NORM, APART,
        )  # fmt: skip


def gemv(args: LinearArgs, out: Tensor, plan: GemmPlan, *, pdl: bool) -> Launch:
    """Returns the launch that writes the layer `args` to `out` [M, N].

    M is at most 4, and `plan.norm` is not "separate"."""
    m, k, n = args.x.shape[0], args.k, args.n
    x, own, res, norm = args.x, Operands(args.weight), args.residual, args.norm
    w = own.values
    prefetch_k = min(k // own.step, plan.prefetch // w.element_size())
    operands = (
        x, w, own.scales, own.zeros, x if args.bias is None else args.bias,
        x if res is None else res, x if norm is None else norm.weight, out, m, n, k,
        x.stride(0), w.stride(0), own.scales.stride(0), 0 if res is None else res.stride(0),
        out.stride(0), 0.0 if norm is None else norm.eps, prefetch_k,
    )  # fmt: skip
    named = options(
        pdl, MB=plan.bm, BN=plan.bn, BK=plan.bk, EVEN_K=k % plan.bk == 0, SINGLE=k <= plan.bk,
        STAGES=plan.stages, GLU=args.gated, ACT=args.act_name,
        NORM="none" if norm is None else plan.norm,
        HAS_SCALES=own.has_scales, HAS_BIAS=args.bias is not None, HAS_RES=res is not None,
        BITS=own.bits, GROUP=own.group, HAS_ZEROS=own.has_zeros,
        APART=args.apart, PDL=pdl, EAGER=plan.eager, PREFETCH=pdl and k > plan.bk,
        num_warps=plan.warps, num_stages=1,
    )  # fmt: skip
    return Launch(gemv_kernel, (triton.cdiv(n, plan.bn),), operands, named)
