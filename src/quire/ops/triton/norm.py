"""RMSNorm (Zhang & Sennrich, 2019) and LayerNorm (Ba et al., 2016), with the residual addition that
precedes them fused in."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.triton.launch import launch, options, traits


@triton.jit
def _norm(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, width, eps, x_stride,
    residual_stride,
    BLOCK: tl.constexpr, CENTER: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row per program, held in registers. The sum with the residual is rounded to its storage
    type first, so that the norm sees what later layers see."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    scale = tl.full([BLOCK], 1.0, tl.float32)
    shift = tl.zeros([BLOCK], tl.float32)
    if WEIGHT:
        scale = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        shift = tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0)
    if RESIDUAL:
        add = tl.load(residual_ptr + row * residual_stride + at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + add.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * width + at, x, mask=inside)
    x = x.to(tl.float32)
    if CENTER:
        x = tl.where(inside, x - tl.sum(x, 0) / width, 0.0)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    out = x * inverse
    kind = out_ptr.dtype.element_ty
    if not CENTER:
        # Rounded before the weight, as published models were trained.
        out = out.to(kind).to(tl.float32)
    tl.store(out_ptr + row * width + at, (out * scale + shift).to(kind), mask=inside)


def _run(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    *,
    center: bool,
    pdl: bool | None,
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out) if residual is not None else x
    if rows.shape[0] == 0:
        return out, total
    add = rows if residual is None else residual.reshape(-1, width)
    block = triton.next_power_of_2(width)
    use_pdl = traits(x.device).pdl if pdl is None else pdl
    launch(_norm, (rows.shape[0],))(
        rows, add, rows if weight is None else weight, rows if bias is None else bias, out, total,
        width, eps, rows.stride(0), add.stride(0),
        BLOCK=block, CENTER=center, RESIDUAL=residual is not None, WEIGHT=weight is not None,
        BIAS=bias is not None, PDL=use_pdl,
        **options(use_pdl, num_warps=min(max(block // 512, 1), 16)),
    )  # fmt: skip
    return out, total


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, pdl: bool | None = None) -> Tensor:
    """x: [..., width], rows of any stride. x / rms(x), rounded to x's type, times weight."""
    return _run(x, weight, None, eps, None, center=False, pdl=pdl)[0]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    pdl: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """(norm of `x + residual`, `x + residual`), both [..., width] in x's type."""
    return _run(x, weight, None, eps, residual, center=False, pdl=pdl)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    pdl: bool | None = None,
) -> Tensor:
    """x: [..., width]. Mean and variance in fp32, result in x's type."""
    return _run(x, weight, bias, eps, None, center=True, pdl=pdl)[0]


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    pdl: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """(norm of `x + residual`, `x + residual`), both [..., width] in x's type."""
    return _run(x, weight, bias, eps, residual, center=True, pdl=pdl)
