"""Linear layers and activations."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.arguments import Activation, RmsScale
from quire.ops.experts import ExpertCopies, Routed, Routing
from quire.ops.fixed.products import products, wider
from quire.ops.reference import dense
from quire.ops.reference.dense import rms_norm
from quire.ops.reference.experts import choose, into
from quire.ops.reference.quantized import dequantize, round_inputs
from quire.ops.weight import Weight


def activate(x: Tensor, act: Activation, dtype: torch.dtype | None = None) -> Tensor:
    """See `reference.activate`."""
    wide = x.to(wider(x.dtype))
    gate, *up = wide.chunk(2, -1) if act.endswith("_and_mul") else (wide,)
    if act.startswith("silu"):
        out = dense.silu(gate)
    elif act.startswith("gelu_tanh"):
        out = dense.gelu_tanh(gate)
    else:
        out = dense.gelu(gate)
    return (out.mul_(up[0]) if up else out).to(dtype or x.dtype)


def linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: RmsScale | None = None,
    act: Activation | None = None,
) -> Tensor:
    """See `reference.linear`. Computes in float32 or wider."""
    if norm is not None:
        x = rms_norm(x, *norm)
    out = products(round_inputs(x, weight).to(wider(x.dtype)), widened(weight, x.dtype))
    if bias is not None:
        out += bias
    if act is not None:
        out = activate(out, act)
    return (out if residual is None else out + residual).to(x.dtype)


def widened(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Returns the weights as [outputs, inputs] rounded to `dtype`, in float32 or wider."""
    values = weight.values if weight.format.scales is None else dequantize(weight, dtype)
    return values.to(wider(dtype))


# -- the choice of experts ---------------------------------------------------------------------


def route(
    x: Tensor,
    weight: Tensor,
    routing: Routing,
    *,
    live: Tensor,
    norm: RmsScale | None = None,
    bias: Tensor | None = None,
    correction: Tensor | None = None,
    first: int = 0,
    count: int | None = None,
    copies: ExpertCopies | None = None,
    ids: Tensor | None = None,
) -> Routed:
    """See `reference.experts.route`."""
    if norm is not None:
        x = rms_norm(x, *norm)
    wide = wider(x.dtype)
    logits = products(x.to(wide), weight.to(wide))
    if bias is not None:
        logits += bias
    scores = logits.softmax(1) if routing.score == "softmax" else dense.sigmoid(logits)
    end = len(weight) - first if count is None else count
    return into(ids, choose(x, scores, routing, live, correction, first, end, copies))
