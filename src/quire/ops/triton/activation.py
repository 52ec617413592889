"""Activations as a kernel of their own, and as a function for fused kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.arguments import Activation
from quire.ops.triton.launch import launch, options, traits


@triton.jit
def activate(x, ACT: tl.constexpr):
    """Returns the activation of fp32 x (GELU: Hendrycks & Gimpel, 2016); "" is the identity."""
    if ACT == "silu":
        x = x * tl.sigmoid(x)
    elif ACT == "gelu":
        x = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        # 0.5 (1 + tanh u) = sigmoid(2 u)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x


@triton.jit
def _activation(
    x_ptr, out_ptr, width, x_stride,
    BLOCK: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0)
    out = activate(x.to(tl.float32), ACT)
    if GATED:
        up = tl.load(x_ptr + row * x_stride + width + at, mask=inside, other=0.0)
        out = out * up.to(tl.float32)
    tl.store(out_ptr + row * width + at, out.to(out_ptr.dtype.element_ty), mask=inside)


def run(
    x: Tensor, act: Activation, dtype: torch.dtype | None = None, *, pdl: bool | None = None
) -> Tensor:
    """See `ops.activate`; computed in fp32."""
    gated = act.endswith("_and_mul")
    width = x.shape[-1] // 2 if gated else x.shape[-1]
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty((*x.shape[:-1], width), dtype=dtype or x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    # With few rows, narrow blocks spread over the card. With many rows, wide blocks amortize the
    # cost of a program.
    block = min(triton.next_power_of_2(width), 1024 if rows.shape[0] <= 64 else 4096)
    use_pdl = traits(x.device).pdl if pdl is None else pdl
    launch(_activation, (rows.shape[0], triton.cdiv(width, block)))(
        rows, out, width, rows.stride(0), BLOCK=block, ACT=act.removesuffix("_and_mul"),
        GATED=gated, PDL=use_pdl, **options(use_pdl, num_warps=min(max(block // 256, 1), 8)),
    )  # fmt: skip
    return out
