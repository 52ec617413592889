"""The linear layer on a GPU: one fused kernel for few rows, cuBLAS with its neighbours for many."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.choose import current_policy
from quire.ops.triton.activation import gelu, silu_and_mul
from quire.ops.triton.gemm import LinearArgs, RMSNorm, run_fixed, small_linear
from quire.ops.triton.gemm_table import BUCKETS
from quire.ops.triton.norm import rms_norm


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    act: str | None = None,
) -> Tensor:
    """See `ops.linear`."""
    policy = current_policy()
    if policy.deterministic:
        scale = None if norm is None else RMSNorm(*norm)
        args = LinearArgs(x, weight, bias, scale, residual, act)
        return run_fixed(args, rms_norm=_normed)
    if "fusions" in policy.disabled and (norm or act or residual is not None):
        if norm is not None:
            x = rms_norm(x, *norm)
        return _finish(linear(x, weight, bias, None, None, None), residual, act)
    if len(x) <= BUCKETS[-1] and "skinny" not in policy.disabled:
        scale = None if norm is None else RMSNorm(*norm)
        args = LinearArgs(x, weight, bias, scale, residual, act)
        out = small_linear(args, rms_norm=_normed)
        if out is not None:
            return out
    if norm is not None:
        x = rms_norm(x, *norm)
    if act is None and residual is not None and bias is None:
        # In place: otherwise the residual is copied to where the result goes first.
        return torch.addmm(residual, x, weight.t(), out=residual)
    return _finish(F.linear(x, weight, bias), residual, act)


def _finish(out: Tensor, residual: Tensor | None, act: str | None) -> Tensor:
    if act == "silu_and_mul":
        out = silu_and_mul(out)
    elif act is not None:
        out = gelu(out, "tanh" if act == "gelu_tanh" else "none")
    return out if residual is None else out.add_(residual)


def _normed(x: Tensor, norm: RMSNorm) -> Tensor:
    return rms_norm(x, norm.weight, norm.eps)
