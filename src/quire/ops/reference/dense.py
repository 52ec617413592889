"""Functions whose rounding does not depend on a number's place in its tensor.

PyTorch's own functions, except exp, log1p, erf and tanh, use other code for the elements past the
last whole vector. A number's last bit then depends on the tensor's size."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.arguments import Activation, RmsScale
from quire.ops.choose import current_policy
from quire.ops.reference import quantized
from quire.ops.weight import Weight


def sigmoid(x: Tensor) -> Tensor:
    """Returns 1 / (1 + exp(-x))."""
    return x.neg().exp_().add_(1).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """Returns x sigmoid(x)."""
    return x / x.neg().exp_().add_(1)


def softplus(x: Tensor) -> Tensor:
    """Returns log(1 + exp(x))."""
    return x.clamp(min=0) + x.abs().neg_().exp_().log1p_()


def gelu(x: Tensor) -> Tensor:
    """Returns x Φ(x), where Φ is the normal distribution function (Hendrycks & Gimpel 2016)."""
    return (x * math.sqrt(0.5)).erf_().add_(1) * (x * 0.5)


def gelu_tanh(x: Tensor) -> Tensor:
    """Returns the approximation of `gelu` by tanh."""
    inner = (x * x * x).mul_(0.044715).add_(x).mul_(math.sqrt(2 / math.pi))
    return torch.tanh(inner).add_(1) * (x * 0.5)


# -- norms, activations, products and look-ups over [tokens, width] ----------------------------

_WIDE = (torch.float32, torch.float64)
_ZERO = torch.zeros(())


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Returns x / sqrt(mean(x²) + eps) * weight over the last axis (Zhang & Sennrich 2019), plus
    `residual`.

    The normalized value is rounded to the weight's dtype before it is multiplied by the weight.
    Models with weights of x's dtype were trained in this way. With wider weights only the result is
    rounded."""
    one = x.numel() == weight.numel() and x.dtype is torch.float32 and x.device.type == "cpu"
    if one and eps and not current_policy().deterministic:
        # PyTorch's norm takes nine operations. On one row their calls cost more than their work.
        row = x.reshape(-1)
        factor = (torch.dot(row, row).item() / row.shape[0] + eps) ** -0.5
        return torch.addcmul(_ZERO if residual is None else residual, x, weight, value=factor)
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
    """Returns act(x) (GELU: Hendrycks & Gimpel 2016), of the same shape.

    A gated activation returns act(gate) * up, [T, width], for x [T, 2 * width] = [gate | up]
    (Shazeer 2020).

    Args:
        dtype: dtype of the result; by default x's.
    """
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

    After the product come, in this order, scales, adapters, bias, activation and residual. The
    result may reuse the residual's memory.

    Args:
        norm: applied to x.
        act: activation; a gated one halves the width.
    """
    if norm is not None:
        x = rms_norm(x, *norm)
    if weight.format.scales is None and weight.prepacked is None:
        out = product(x, weight.values, bias)
    else:
        out = quantized.product(x, weight, product)
        out = out if bias is None else out.add_(bias)
    if act is not None:
        out = activate(out, act)
    return out if residual is None else out.add_(residual)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if _suits_onednn(x, weight):
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return F.linear(x, weight, bias)


def _suits_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN computes an fp32 product on a CPU faster than BLAS, PyTorch's default.

    MKL multiplies a few rows in one thread; oneDNN uses all threads. A call of oneDNN takes 10 µs,
    which exceeds the gain in tiny products. oneDNN also keeps a program of about 0.5 MB for each
    number of rows, and a copy of most strided weights. On Intel's processors MKL uses all threads
    too, except for three or more rows if the weight is stored output by output."""
    return (
        torch.get_num_threads() > 1
        and x.dtype is torch.float32
        and x.device.type == "cpu"
        and (3 if _intel() else 1) <= x.shape[0] <= _ONEDNN_ROWS
        and x.shape[0] * weight.numel() >= 1 << 17
        and (weight.is_contiguous() or (not _intel() and weight.t().is_contiguous()))
    )


@functools.cache
def _intel() -> bool:
    """Whether Intel made the processor. Cached, because Linux takes long to list many cores."""
    return any("GenuineIntel" in file.read_text() for file in Path("/proc").glob("cpuinfo"))


_HAS_ONEDNN = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_ONEDNN_ROWS = 16 if _HAS_ONEDNN else 0


def embedding(ids: Tensor, table: Tensor, start: int = 0) -> Tensor:
    """Returns rows of `table` [rows, width] for int ids [T], as [T, width].

    The table holds ids from `start` on. Ids outside of the table, including -1, give zeros.
    """
    local = ids - start if start else ids
    inside = (local >= 0) & (local < table.shape[0])
    rows = F.embedding(local.clamp(0, table.shape[0] - 1), table)
    return rows.masked_fill_(~inside.unsqueeze(-1), 0.0)


def replace_rows(hidden: Tensor, source: Tensor, values: Tensor) -> Tensor:
    """Writes rows of `values` [N, width] over rows of `hidden` [T, width], and returns `hidden`.

    Args:
        source: int32 [T], a row of `values`, or -1 to leave the row as it is.
    """
    chosen = values[source.clamp(min=0).long()].to(hidden.dtype)
    return hidden.copy_(chosen.where((source >= 0).unsqueeze(1), hidden))


def add_rows(hidden: Tensor, source: Tensor, values: Tensor) -> Tensor:
    """Adds rows of `values` to rows of `hidden`, and returns `hidden`. See `replace_rows`."""
    chosen = values[source.clamp(min=0).long()].to(hidden.dtype)
    return hidden.add_(chosen.masked_fill((source < 0).unsqueeze(1), 0.0))


def section_rotary(table: Tensor, positions: Tensor, part: Tensor) -> Tensor:
    """Returns each token's cosines and sines, float32 [T, rotary_dim].

    Args:
        table: float32 [positions, rotary_dim], the cosines of all pairs, then their sines.
        positions: int32 [3, T].
        part: int32 [rotary_dim / 2], which of the three positions turns each pair.
    """
    where = positions.long()[torch.cat([part, part]).long()].t()
    return table.gather(0, where)
