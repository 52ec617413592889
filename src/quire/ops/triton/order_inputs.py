"""Inputs in the order in which `hopper_gemm_kernel.py` multiplies them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.arguments import RmsScale
from quire.ops.triton.gemm_common import normalise, wait_for_predecessor
from quire.ops.triton.launch import launch, options, traits

LIFT = 2.0**64
"""The factor of bf16: the kernel's weights are as much too small."""
_BLOCK = 1024
"""Inputs of a program that applies no norm."""


@triton.jit
def _order_kernel(
    x_ptr, g_ptr, out_ptr, K, width, eps, stride_xm, VALUES: tl.constexpr, NORM: tl.constexpr,
    LIFT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: rows, blocks of inputs. VALUES: of a word. NORM: RMSNorm comes first; a program then
    has a whole row."""
    if PDL:
        wait_for_predecessor(False)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # Of a step: thread of four, word of the thread, place in the word.
    STEP: tl.constexpr = 32 * VALUES
    thread, word = at % 8 // 2, at % STEP // (4 * VALUES)
    place = at % (4 * VALUES) // 8 + VALUES // 2 * (at % 2)
    source = at // STEP * STEP + 8 * VALUES * thread + VALUES * word + place
    x = tl.load(x_ptr + row * stride_xm + source, mask=source < K, other=0.0)
    if NORM:
        g = tl.load(g_ptr + source, mask=source < K, other=0.0).to(tl.float32)
        x = x.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 0) / K + eps)
        x = normalise(x, inverse, g, x_ptr.dtype.element_ty, g_ptr.dtype.element_ty)
    x = (x.to(tl.float32) * LIFT).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + at, x, mask=at < width)


def order_inputs(x: Tensor, norm: RmsScale | None = None, bits: int = 4) -> Tensor:
    """Returns norm(x) [rows, K up to a multiple of a step], each step's inputs in the kernel's
    order, zeros behind the last; bf16 times LIFT, which is exact: inputs are below 2^63.

    bits: of a weight. A step is 32 words of a weight row. A thread of the kernel reads 8 words of
    v = 32 / bits neighbouring weights, and unpacks values v / 2 apart in a word together; so input
    8 v q + v w + v e / 2 + c of a step goes to 4 v w + 8 c + 2 q + e."""
    rows, inputs = x.shape
    step = 1024 // bits
    width = triton.cdiv(inputs, step) * step
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    block = _BLOCK if norm is None else triton.next_power_of_2(width)
    pdl = traits(x.device).pdl
    launch(_order_kernel, (rows, triton.cdiv(width, block)))(
        x, x if norm is None else norm.weight, out, inputs, width,
        0.0 if norm is None else norm.eps, x.stride(0), VALUES=32 // bits, NORM=norm is not None,
        LIFT=LIFT if x.dtype == torch.bfloat16 else 1.0, BLOCK=block, PDL=pdl,
        **options(pdl, num_warps=min(max(block // 512, 1), 16)),
    )  # fmt: skip
    return out
