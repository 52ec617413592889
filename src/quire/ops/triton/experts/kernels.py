"""Products of tokens and their experts: a GEMV for few tokens, tiles of sorted tokens for many."""

# Tuples that grow in a loop unrolled at compile time have no single type.
# mypy: disable-error-code="assignment, var-annotated"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.launch import launch, options, traits
from quire.ops.triton.products.common import load_k, tile_rows, wait_for_predecessor
from quire.ops.triton.products.quantized_tiles import LIFT, load_groups, load_tile, widen
from quire.ops.triton.products.skinny import product


@triton.jit
def swiglu(
    gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, CUBIC: tl.constexpr
):
    """Returns gate * sigmoid(alpha * gate + cubic * gate³) * (up + shift). If there is a limit,
    gate and up are clipped first."""
    if LIMIT > 0:
        # Comparisons, unlike minima, propagate NaN.
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    slope = ALPHA
    if CUBIC != 0:
        slope = ALPHA + CUBIC * gate * gate
    return gate / (1.0 + tl.exp(-slope * gate)) * (up + SHIFT)


@triton.jit
def _loaded(
    w_ptr, s_ptr, z_ptr, rows, k0, K, stride_wn, stride_sn, BK: tl.constexpr, EVEN_K: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
):  # fmt: skip
    """Returns stored weights of rows and inputs [k0, k0 + BK), and the scales and zeros of their
    groups."""
    w = load_tile(w_ptr + rows[:, None] * stride_wn, k0, K, BK, BITS, EVEN_K)
    s = 1.0
    z = 0.0
    if GROUP > 0:
        s = load_groups(s_ptr + rows[:, None] * stride_sn, k0, K, BK, GROUP, EVEN_K)
    if HAS_ZEROS:
        z = load_groups(z_ptr + rows[:, None] * stride_sn, k0, K, BK, GROUP, EVEN_K)
    return w, s, z


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
    x_row = x_ptr + (a // TOP_K).to(tl.int64) * stride_xm
    acc = tl.zeros([R, BK], tl.float32)
    for k0 in range(0, K, BK):
        w, s, z = _loaded(
            w_ptr, s_ptr, z_ptr, rows, k0, K, stride_wn, stride_sn, BK, EVEN_K, BITS, GROUP,
            HAS_ZEROS,
        )  # fmt: skip
        # `widen` returns 4-bit floats divided by LIFT.
        w = widen(w, s, z, R, BK, BITS, GROUP, HAS_ZEROS, E2M1)
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
def _part(
    w, s, z, x_ptr, ids_ptr, weights_ptr, s_ptr, k, t, some, outputs, N, K, stride_sn, j,
    TOP_K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HAS_SCALES: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, E2M1: tl.constexpr,
):  # fmt: skip
    """Returns the weighted products [BN, BK] of loaded weights and units `k` of a token's expert j.

    It loads some values again, because keeping them would take registers from weights."""
    expert = tl.load(ids_ptr + j)
    share = tl.load(weights_ptr + j)
    mask = k < tl.where(expert >= 0, K, 0)
    x = tl.load(x_ptr + (t * TOP_K + j) * K + k, mask=mask, other=0.0)
    part = widen(w, s, z, BN, BK, BITS, GROUP, HAS_ZEROS, E2M1)
    part *= (x.to(tl.float32) * share)[None, :]
    if HAS_SCALES:
        rows = tl.where(expert >= 0, expert, some).to(tl.int64) * N + outputs
        part *= tl.load(s_ptr + rows * stride_sn).to(tl.float32)[:, None]
    return part


@triton.jit
def down_gemv_kernel(
    x_ptr, ids_ptr, weights_ptr, w_ptr, s_ptr, z_ptr, bias_ptr, res_ptr, y_ptr, N, K, stride_wn,
    stride_sn, stride_rm, stride_ym,
    TOP_K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RES: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, E2M1: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes y [T, N] from units x [T * k, K]: the weighted sum of the outputs of a token's
    experts, plus the residual.

    Grid: tiles of outputs, tokens. The weights of EARLY tiles of K, for all experts, are requested
    while the preceding kernel computes the units. The router has finished before, so the ids are
    known."""
    pid, t = tl.program_id(0), tl.program_id(1).to(tl.int64)
    cols = pid * BN + tl.arange(0, BN)
    mask = cols < N
    outputs = tl.minimum(cols, N - 1)
    ks = tl.arange(0, BK)
    all_k = tl.arange(0, KP)
    ids_ptr += t * TOP_K
    weights_ptr += t * TOP_K
    # If a token has fewer experts, one of its experts (or expert 0) is read again, and its product
    # is dropped.
    some = tl.maximum(tl.max(tl.load(ids_ptr + all_k, mask=all_k < TOP_K, other=-1), 0), 0)
    held = ()
    for index in tl.static_range(EARLY * TOP_K):
        expert = tl.load(ids_ptr + index % TOP_K)
        rows = tl.where(expert >= 0, expert, some).to(tl.int64) * N + outputs
        held = held + (
            _loaded(w_ptr, s_ptr, z_ptr, rows, index // TOP_K * BK, K, stride_wn, stride_sn, BK,
                    EVEN_K, BITS, GROUP, HAS_ZEROS),
        )  # fmt: skip
    if PDL:
        wait_for_predecessor(False)
    acc = tl.zeros([BN, BK], tl.float32)
    for index in tl.static_range(EARLY * TOP_K):
        w, s, z = held[index]
        acc += _part(
            w, s, z, x_ptr, ids_ptr, weights_ptr, s_ptr, index // TOP_K * BK + ks, t, some, outputs,
            N, K, stride_sn, index % TOP_K, TOP_K, BN, BK, HAS_SCALES, BITS, GROUP, HAS_ZEROS, E2M1,
        )  # fmt: skip
    for k0 in range(EARLY * BK, K, BK):
        for j in tl.static_range(TOP_K):
            expert = tl.load(ids_ptr + j)
            rows = tl.where(expert >= 0, expert, some).to(tl.int64) * N + outputs
            w, s, z = _loaded(
                w_ptr, s_ptr, z_ptr, rows, k0, K, stride_wn, stride_sn, BK, EVEN_K, BITS, GROUP,
                HAS_ZEROS,
            )  # fmt: skip
            acc += _part(
                w, s, z, x_ptr, ids_ptr, weights_ptr, s_ptr, k0 + ks, t, some, outputs, N, K,
                stride_sn, j, TOP_K, BN, BK, HAS_SCALES, BITS, GROUP, HAS_ZEROS, E2M1,
            )  # fmt: skip
    total = tl.sum(acc, 1)
    if E2M1:
        total *= LIFT
    if HAS_BIAS:
        for j in tl.static_range(TOP_K):
            expert = tl.load(ids_ptr + j)
            share = tl.load(weights_ptr + j)
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
    """Computes y [A, N] for blocks of assignments to one expert. Assignment a uses row
    a // ROWS_PER_X of x.

    y is gated units, or outputs times routing weights. Blocks of one expert run at the same time
    for one tile of outputs, so that its weights stay in L2. Grid: blocks, tiles of outputs."""
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
    """Computes y [T, N], the sum of a token's parts [T * k, N] in order, plus the residual.

    Grid: tokens, tiles of outputs."""
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


# -- the gate of the shared expert, and the addition to the residual ---------------------------


@triton.jit
def _add_gated(
    y_ptr, x_ptr, w_ptr, res_ptr, out_ptr, N, K, stride_ym, stride_xm, stride_rm,
    BN: tl.constexpr, BK: tl.constexpr, HAS_RES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes y [T, N] * sigmoid(x [T, K] @ w [K]) + residual. Grid: tokens, tiles of N."""
    token, pid = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ks, ns = tl.arange(0, BK), pid * BN + tl.arange(0, BN)
    w = tl.load(w_ptr + ks, mask=ks < K, other=0.0).to(tl.float32)
    if PDL:
        wait_for_predecessor(False)
    x = tl.load(x_ptr + token * stride_xm + ks, mask=ks < K, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + token * stride_ym + ns, mask=ns < N, other=0.0).to(tl.float32)
    if HAS_RES:
        res = tl.load(res_ptr + token * stride_rm + ns, mask=ns < N, other=0.0).to(tl.float32)
    y *= tl.sigmoid(tl.sum(x * w, 0))
    if HAS_RES:
        y += res
    tl.store(out_ptr + token * N + ns, y.to(out_ptr.dtype.element_ty), mask=ns < N)


def add_gated(y: Tensor, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    """See `reference.experts.add_gated`. Sums are fp32, and rounded once."""
    tokens, n = y.shape
    out = torch.empty_like(y)
    if not tokens:
        return out
    bn, pdl = min(1024, triton.next_power_of_2(n)), traits(y.device).pdl
    launch(_add_gated, (tokens, triton.cdiv(n, bn)))(
        y, x, weight, y if residual is None else residual, out, n, x.shape[1], y.stride(0),
        x.stride(0), 0 if residual is None else residual.stride(0),
        BN=bn, BK=triton.next_power_of_2(x.shape[1]), HAS_RES=residual is not None, PDL=pdl,
        **options(pdl, num_warps=8),
    )  # fmt: skip
    return out
