"""RMSNorm (Zhang & Sennrich, 2019) and LayerNorm (Ba et al., 2016)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.triton.launch import launch, options, traits


@triton.jit
def _norm(
    x_ptr, weight_ptr, bias_ptr, res_ptr, out_ptr, width, eps, x_stride, res_stride,
    BLOCK: tl.constexpr, CENTER: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norms one row per program, held in registers."""
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
    x = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if CENTER:
        x = tl.where(inside, x - tl.sum(x, 0) / width, 0.0)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    out = x * inverse
    kind = out_ptr.dtype.element_ty
    if not CENTER:
        # Rounds to the weight's dtype before the product, see `ops.rms_norm`.
        out = out.to(weight_ptr.dtype.element_ty).to(tl.float32)
    out = out * scale + shift
    if RESIDUAL:
        residual = tl.load(res_ptr + row * res_stride + at, mask=inside, other=0.0)
        out = out.to(kind).to(tl.float32) + residual.to(tl.float32)
    tl.store(out_ptr + row * width + at, out.to(kind), mask=inside)


def _run(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    *,
    center: bool,
    pdl: bool | None,
) -> Tensor:
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0] == 0:
        return out
    block = triton.next_power_of_2(width)
    use_pdl = traits(x.device).pdl if pdl is None else pdl
    launch(_norm, (rows.shape[0],))(
        rows, rows if weight is None else weight, rows if bias is None else bias,
        rows if residual is None else residual, out, width, eps, rows.stride(0),
        0 if residual is None else residual.stride(-2),
        BLOCK=block, CENTER=center, WEIGHT=weight is not None, BIAS=bias is not None,
        RESIDUAL=residual is not None, PDL=use_pdl,
        **options(use_pdl, num_warps=min(max(block // 512, 1), 16)),
    )  # fmt: skip
    return out


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
    *,
    pdl: bool | None = None,
) -> Tensor:
    """See `ops.rms_norm`.

    Args:
        x: rows of any stride.
        weight: None means ones.
        residual: rows of any stride.
        pdl: programmatic dependent launch; by default it is used on cards that have it.
    """
    return _run(x, weight, None, residual, eps, center=False, pdl=pdl)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    pdl: bool | None = None,
) -> Tensor:
    """See `ops.layer_norm`. Mean and variance are fp32. A weight of None means ones."""
    return _run(x, weight, bias, None, eps, center=True, pdl=pdl)
