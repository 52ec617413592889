"""Norms, activations, products and look-ups over [tokens, width]."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.arguments import Activation, RmsScale
from quire.ops.weight import Weight

_WIDE = (torch.float32, torch.float64)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Returns x / sqrt(mean(x²) + eps) * weight over the last axis (Zhang & Sennrich 2019), plus
    `residual`.

    The normalized value is rounded to the weight's dtype before the product: models with weights of
    x's dtype were trained like that, others round only what comes out.
    """
    if x.dtype in _WIDE:
        out = F.rms_norm(x, (x.shape[-1],), weight, eps)
    else:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        out = (normed.to(weight.dtype) * weight).to(x.dtype)
    return out if residual is None else residual + out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Returns (x - mean) / sqrt(variance + eps) * weight + bias over the last axis (Ba et al.
    2016)."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def activate(x: Tensor, act: Activation, dtype: torch.dtype | None = None) -> Tensor:
    """Returns act(x) (GELU: Hendrycks & Gimpel 2016), of the same shape, or, gated, act(gate) * up,
    [T, width], for x [T, 2 * width] = [gate | up] (Shazeer 2020). dtype: by default x's."""
    gate, *up = x.chunk(2, -1) if act.endswith("_and_mul") else (x,)
    if act.startswith("silu"):
        out = F.silu(gate)
    else:
        out = F.gelu(gate, approximate="tanh" if act.startswith("gelu_tanh") else "none")
    return (out.mul_(up[0]) if up else out).to(dtype or x.dtype)


def linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: RmsScale | None = None,
    act: Activation | None = None,
) -> Tensor:
    """Returns act(norm(x) [T, in] @ weight [out, in]ᵀ + bias [out]) + residual [T, out].

    norm: applied to x. act: a gated one halves the width. What follows the product comes in this
    order: scales, adapters, bias, activation, residual. The result may take the residual's place in
    memory.
    """
    if norm is not None:
        x = rms_norm(x, *norm)
    if weight.format.scales is None:
        out = _product(x, weight.values, bias)
    else:
        # Most weights are stored as they are.
        from quire.ops.reference import quantized

        x = quantized.round_inputs(x, weight)
        out = _scaled_product(x, weight)
        out = out if bias is None else out.add_(bias)
    if act is not None:
        out = activate(out, act)
    return out if residual is None else out.add_(residual)


def _scaled_product(x: Tensor, weight: Weight) -> Tensor:
    """Returns x @ weightᵀ, with the scales applied to the products where outputs have one each."""
    from quire.ops.reference.quantized import dequantize

    scales = weight.scales
    if scales is None or weight.format.group or weight.format.zeros or x.dtype not in _WIDE:
        return _product(x, dequantize(weight, x.dtype), None)
    out = _product(x, dequantize(replace(weight, scales=None), x.dtype), None)
    return out.mul_(scales.squeeze(1))


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if _suits_onednn(x, weight):
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return F.linear(x, weight, bias)


def _suits_onednn(x: Tensor, weight: Tensor) -> bool:
    """PyTorch sends fp32 products on a CPU to BLAS, which uses one thread for a single row and was
    measured twice as slow as oneDNN from one row to a thousand; only for tiny products does the
    10 µs that a call of oneDNN takes cost more than it saves."""
    return (
        _HAS_ONEDNN_LINEAR
        and x.dtype is torch.float32
        and x.device.type == "cpu"
        and x.shape[0] * weight.numel() >= _ONEDNN_PRODUCTS
    )


def _has_onednn_linear() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(  # type: ignore[no-untyped-call]
        torch.ops.mkldnn, "_linear_pointwise"
    )


_ONEDNN_PRODUCTS = 1 << 17
_HAS_ONEDNN_LINEAR = _has_onednn_linear()


def embedding(ids: Tensor, table: Tensor, start: int = 0) -> Tensor:
    """Returns rows of `table` [rows, width] for int ids [T], as [T, width].

    The table holds ids from `start` on; ids outside of it, -1 among them, give zeros.
    """
    local = ids - start if start else ids
    inside = (local >= 0) & (local < table.shape[0])
    rows = F.embedding(local.clamp(0, table.shape[0] - 1), table)
    return rows.masked_fill_(~inside.unsqueeze(-1), 0.0)
