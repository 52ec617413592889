"""Inputs in the order in which `hopper_gemm_kernel.py` multiplies them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.arguments import RmsScale
from quire.ops.triton.gemm_common import normalise, wait_for_predecessor
from quire.ops.triton.launch import launch, options, traits

_BLOCK = 1024
"""Inputs of a program that applies no norm."""


@triton.jit
def _order_kernel(
    x_ptr, g_ptr, out_ptr, K, eps, stride_xm, NORM: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: rows, blocks of inputs. NORM: RMSNorm comes first; a program then has a whole row."""
    if PDL:
        wait_for_predecessor(False)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # Of a chunk of 128: thread of four, pair of words, word of the pair, place in the word.
    thread, pair, word, place = at % 8 // 2, at % 128 // 64, at % 2, at % 64 // 8
    source = at // 128 * 128 + 32 * thread + 16 * pair + 8 * word + place
    x = tl.load(x_ptr + row * stride_xm + source, mask=at < K, other=0.0)
    if NORM:
        g = tl.load(g_ptr + source, mask=at < K, other=0.0).to(tl.float32)
        x = x.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 0) / K + eps)
        x = normalise(x, inverse, g, x_ptr.dtype.element_ty, g_ptr.dtype.element_ty)
    tl.store(out_ptr + row * K + at, x.to(out_ptr.dtype.element_ty), mask=at < K)


def order_inputs(x: Tensor, norm: RmsScale | None = None) -> Tensor:
    """Returns norm(x) [rows, K], each 128 inputs in the kernel's order. K: a multiple of 128.

    A thread of the kernel reads words of 8 neighbouring weights, and multiplies 2 of each row and
    step that stand 8 apart; so input 32 q + 16 i + 8 e + c goes to 64 i + 8 c + 2 q + e."""
    rows, inputs = x.shape
    out = torch.empty(rows, inputs, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    block = _BLOCK if norm is None else triton.next_power_of_2(inputs)
    pdl = traits(x.device).pdl
    launch(_order_kernel, (rows, triton.cdiv(inputs, block)))(
        x, x if norm is None else norm.weight, out, inputs, 0.0 if norm is None else norm.eps,
        x.stride(0), NORM=norm is not None, BLOCK=block, PDL=pdl,
        **options(pdl, num_warps=min(max(block // 512, 1), 16)),
    )  # fmt: skip
    return out
