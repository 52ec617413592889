"""The gate of the expert that every token takes, with the sum behind it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.gemm_common import wait_for_predecessor
from quire.ops.triton.launch import launch, options, traits


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
