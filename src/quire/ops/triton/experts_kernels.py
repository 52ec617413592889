"""Products of tokens and their experts: a GEMV for few tokens, tiles of sorted tokens for many."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.triton.gemm_common import load_k, tile_rows, wait_for_predecessor
from quire.ops.triton.quantized_tiles import LIFT, load_groups, load_tile, widen
from quire.ops.triton.skinny_gemm import product


@triton.jit
def swiglu(
    gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, CUBIC: tl.constexpr
):
    """Returns gate * sigmoid(alpha * gate + cubic * gate³) * (up + shift), both cut first if there
    is a limit."""
    if LIMIT > 0:
        # Comparisons, unlike minima, keep what is no number.
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    slope = ALPHA
    if CUBIC != 0:
        slope = ALPHA + CUBIC * gate * gate
    return gate / (1.0 + tl.exp(-slope * gate)) * (up + SHIFT)


@triton.jit
def _tile(
    w_ptrs, s_ptrs, z_ptrs, k0, K, R: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, E2M1: tl.constexpr,
):  # fmt: skip
    """Returns weights of inputs [k0, k0 + BK), fp32 [R, BK], without the scales of outputs; 4-bit
    floats 1 / LIFT as large."""
    w = load_tile(w_ptrs, k0, K, BK, BITS, EVEN_K)
    s = 1.0
    z = 0.0
    if GROUP > 0:
        s = load_groups(s_ptrs, k0, K, BK, GROUP, EVEN_K)
    if HAS_ZEROS:
        z = load_groups(z_ptrs, k0, K, BK, GROUP, EVEN_K)
    return widen(w, s, z, R, BK, BITS, GROUP, HAS_ZEROS, E2M1)


@triton.jit
def up_gemv_kernel(
    x_ptr, ids_ptr, w_ptr, s_ptr, z_ptr, bias_ptr, y_ptr, N, K, stride_xm, stride_wn, stride_sn,
    TOP_K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, CUBIC: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr, E2M1: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes the gated units y [T * k, N] of x [T, K]. Grid: tiles of units, assignments."""
    if PDL:
        wait_for_predecessor(False)
    pid, a = tl.program_id(0), tl.program_id(1)
    expert = tl.load(ids_ptr + a)
    R: tl.constexpr = 2 * BN
    if expert < 0:
        return
    rows = expert.to(tl.int64) * 2 * N + tile_rows(pid, N, BN, True)
    ks = tl.arange(0, BK)
    w_ptrs = w_ptr + rows[:, None] * stride_wn
    s_ptrs = s_ptr + rows[:, None] * stride_sn
    z_ptrs = z_ptr + rows[:, None] * stride_sn
    x_row = x_ptr + (a // TOP_K).to(tl.int64) * stride_xm
    acc = tl.zeros([R, BK], tl.float32)
    for k0 in range(0, K, BK):
        w = _tile(w_ptrs, s_ptrs, z_ptrs, k0, K, R, BK, EVEN_K, BITS, GROUP, HAS_ZEROS, E2M1)
        x = load_k(x_row + k0 + ks, k0 + ks, K, EVEN_K).to(tl.float32)
        acc += w * x[None, :]
    y = tl.sum(acc, 1)
    if E2M1:
        y *= LIFT
    if HAS_SCALES:
        y *= tl.load(s_ptr + rows * stride_sn).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows).to(tl.float32)
    gate, up = tl.split(tl.reshape(y, [BN, 2]))
    cols = pid * BN + tl.arange(0, BN)
    out = swiglu(gate, up, ALPHA, LIMIT, SHIFT, CUBIC).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + a.to(tl.int64) * N + cols, out, mask=cols < N)


@triton.jit
def down_gemv_kernel(
    x_ptr, ids_ptr, weights_ptr, w_ptr, s_ptr, z_ptr, bias_ptr, res_ptr, y_ptr, N, K, stride_wn,
    stride_sn, stride_rm, stride_ym,
    TOP_K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RES: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, E2M1: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Computes y [T, N], the weighted sum over a token's experts of their outputs from units
    x [T * k, K], + residual. Grid: tiles of outputs, tokens."""
    if PDL:
        wait_for_predecessor(False)
    pid, t = tl.program_id(0), tl.program_id(1).to(tl.int64)
    cols = pid * BN + tl.arange(0, BN)
    mask = cols < N
    outputs = tl.minimum(cols, N - 1)
    ks = tl.arange(0, BK)
    all_k = tl.arange(0, KP)
    # Where a token has fewer experts, one that it has is read again, and counts for nothing.
    some = tl.max(tl.load(ids_ptr + t * TOP_K + all_k, mask=all_k < TOP_K, other=-1), 0)
    total = tl.zeros([BN], tl.float32)
    if some >= 0:
        acc = tl.zeros([BN, BK], tl.float32)
        for k0 in range(0, K, BK):
            for j in tl.static_range(TOP_K):
                expert = tl.load(ids_ptr + t * TOP_K + j)
                share = tl.load(weights_ptr + t * TOP_K + j)
                own = expert >= 0
                rows = tl.where(own, expert, some).to(tl.int64) * N + outputs
                w = _tile(
                    w_ptr + rows[:, None] * stride_wn, s_ptr + rows[:, None] * stride_sn,
                    z_ptr + rows[:, None] * stride_sn, k0, K, BN, BK, EVEN_K, BITS, GROUP,
                    HAS_ZEROS, E2M1,
                )  # fmt: skip
                k = k0 + ks
                mask_k = k < tl.where(own, K, 0)
                x = tl.load(x_ptr + (t * TOP_K + j) * K + k, mask=mask_k, other=0.0)
                part = w * (x.to(tl.float32) * share)[None, :]
                if HAS_SCALES:
                    part *= tl.load(s_ptr + rows * stride_sn).to(tl.float32)[:, None]
                acc += part
        total = tl.sum(acc, 1)
        if E2M1:
            total *= LIFT
        if HAS_BIAS:
            for j in tl.static_range(TOP_K):
                expert = tl.load(ids_ptr + t * TOP_K + j)
                share = tl.load(weights_ptr + t * TOP_K + j)
                rows = tl.maximum(expert, 0) * N + outputs
                total += tl.load(bias_ptr + rows).to(tl.float32) * tl.where(expert >= 0, share, 0.0)
    if HAS_RES:
        total += tl.load(res_ptr + t * stride_rm + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + t * stride_ym + cols, total.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["most"])
def grouped_kernel(
    x_ptr, order_ptr, blocks_ptr, most, weights_ptr, w_ptr, s_ptr, z_ptr, bias_ptr, y_ptr, N, K,
    stride_xm, stride_wn, stride_sn,
    ROWS_PER_X: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN_K: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    SHIFT: tl.constexpr, CUBIC: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, E2M1: tl.constexpr,
    SWAP: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes y [A, N] of rows a // ROWS_PER_X of x for each assignment a of a block to its
    expert: gated units, or outputs times the weights of assignments. Blocks of one expert and tile
    run side by side, so that L2 has its weights. Grid: blocks, tiles of outputs."""
    if PDL:
        wait_for_predecessor(False)
    block, pid_n = tl.program_id(0), tl.program_id(1)
    R: tl.constexpr = 2 * BN if GATED else BN
    if block >= tl.load(blocks_ptr + 3 * most):
        return
    expert = tl.load(blocks_ptr + block).to(tl.int64)
    at = tl.load(blocks_ptr + most + block) + tl.arange(0, BM)
    valid = at < tl.load(blocks_ptr + 2 * most + block)
    a = tl.load(order_ptr + at, mask=valid, other=0).to(tl.int64)
    rows = expert * (2 * N if GATED else N) + tile_rows(pid_n, N, BN, GATED)
    cols = pid_n * BN + tl.arange(0, BN)
    acc = product(
        x_ptr + (a // ROWS_PER_X)[:, None] * stride_xm, w_ptr + rows[:, None] * stride_wn,
        s_ptr + rows[:, None] * stride_sn, z_ptr + rows[:, None] * stride_sn, x_ptr,
        tl.full([BM], 1.0, tl.float32), 0, K, K, 0.0, BM, R, BK, EVEN_K, "none", SWAP, UPCAST,
        BITS, GROUP, HAS_ZEROS, E2M1,
    )  # fmt: skip
    if HAS_SCALES:
        acc *= tl.load(s_ptr + rows * stride_sn).to(tl.float32)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + rows).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(acc, [BM, BN, 2]))
        out = swiglu(gate, up, ALPHA, LIMIT, SHIFT, CUBIC)
    else:
        out = acc * tl.load(weights_ptr + a, mask=valid, other=0.0)[:, None]
    mask = valid[:, None] & (cols < N)[None, :]
    y_ptrs = y_ptr + a[:, None] * N + cols[None, :]
    tl.store(y_ptrs, out.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def combine_kernel(
    parts_ptr, ids_ptr, res_ptr, y_ptr, N, stride_rm, stride_ym,
    TOP_K: tl.constexpr, BN: tl.constexpr, HAS_RES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes y [T, N]: the sum of a token's parts [T * k, N], in their order, + residual. Grid:
    tokens, tiles of outputs."""
    if PDL:
        wait_for_predecessor(False)
    t, pid = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = pid * BN + tl.arange(0, BN)
    mask = cols < N
    total = tl.zeros([BN], tl.float32)
    for j in tl.static_range(TOP_K):
        end = tl.where(tl.load(ids_ptr + t * TOP_K + j) >= 0, N, 0)
        part = tl.load(parts_ptr + (t * TOP_K + j) * N + cols, mask=cols < end, other=0.0)
        total += part.to(tl.float32)
    if HAS_RES:
        total += tl.load(res_ptr + t * stride_rm + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + t * stride_ym + cols, total.to(y_ptr.dtype.element_ty), mask=mask)
