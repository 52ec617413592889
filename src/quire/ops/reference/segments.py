"""Products whose inputs are summed by segments, and the sum of segments in pairs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.ops.experts import ExpertWeights, Swiglu
from quire.ops.fixed.dense import linear, widened
from quire.ops.fixed.products import products, wider
from quire.ops.reference import dense
from quire.ops.reference.quantized import round_inputs
from quire.ops.weight import Weight


def add_pairs(
    parts: Tensor, dtype: torch.dtype, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Returns the sum of parts [P, T, N], + bias [N] + residual [T, N], rounded once to `dtype`.

    P is a power of two. Neighbouring parts are added first, then neighbouring sums, and so on. So
    a rank with only half of the parts gets the same sum for that half."""
    while len(parts) > 1:
        parts = parts[0::2] + parts[1::2]
    total = parts[0]
    if bias is not None:
        total = total + bias
    return (total if residual is None else total + residual).to(dtype)


def segment_sum(
    x: Tensor, weight: Weight, segments: int, dtype: torch.dtype, bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns x [T, inputs] @ weightᵀ + bias + residual, [T, outputs], summed by `segments`
    segments of equal length.

    A group of the weight must lie in one segment. See `add_pairs`."""
    return add_pairs(_segments(x, weight, segments), dtype, bias, residual)


def _segments(x: Tensor, weight: Weight, segments: int) -> Tensor:
    """Returns the sums of segments, [segments, T, outputs], in float32 or wider."""
    x, values = round_inputs(x, weight).to(wider(x.dtype)), widened(weight, x.dtype)
    pairs = zip(x.chunk(segments, 1), values.chunk(segments, 1), strict=True)
    return torch.stack([products(*pair) for pair in pairs])


def expert_segments(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: ExpertWeights,
    down: ExpertWeights,
    act: Swiglu,
    segments: int,
) -> Tensor:
    """Returns the weighted sums of down(act(up(x))) for each segment of the hidden units.

    The result is [segments, T, hidden], in float32 or wider. A token's experts are added in the
    order of `ids`. The biases of `down` belong to the first segment. For the other arguments see
    `experts_mlp`."""
    tokens, top_k = ids.shape
    wide = wider(x.dtype)
    out = torch.zeros(segments, tokens, top_k, down.outputs, dtype=wide, device=x.device)
    for expert in range(up.experts):
        token, place = (ids == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        inner = linear(x[token], up.expert(expert), None if up.bias is None else up.bias[expert])
        parts = _segments(_swiglu(inner, act), down.expert(expert), segments)
        if down.bias is not None:
            parts[0] += down.bias[expert]
        out[:, token, place] = parts
    total = torch.zeros_like(out[:, :, 0])
    for each, weight in zip(out.unbind(2), weights.unbind(1), strict=True):
        total += each * weight.unsqueeze(1)
    return total


def _swiglu(x: Tensor, act: Swiglu) -> Tensor:
    """See `reference.experts.swiglu`."""
    gate, up = x.to(wider(x.dtype)).chunk(2, 1)
    if act.limit:
        gate = gate.clamp(max=act.limit)
        up = up.clamp(-act.limit, act.limit)
    slope = act.alpha if not act.cubic else act.alpha + act.cubic * gate.square()
    return (gate * dense.sigmoid(gate * slope) * (up + act.shift)).to(x.dtype)


def columns(weight: Weight, first: int, end: int) -> Weight:
    """Returns the weight of inputs [first, end), a view. Unless the weight has a group index, the
    range must not split a group."""
    packed, group = weight.format.packed, weight.format.group
    groups = (
        slice(None)
        if weight.groups is not None or not group
        else slice(first // group, end // group)
    )
    return replace(
        weight,
        values=weight.values[:, first // packed : end // packed],
        scales=None if weight.scales is None else weight.scales[:, groups],
        zeros=None if weight.zeros is None else weight.zeros[:, groups],
        groups=None if weight.groups is None else weight.groups[first:end],
    )
