"""Row-parallel sums with the same bits for any number of ranks (`--deterministic`).

A layer's inputs are cut into `SEGMENTS` segments. Each segment is summed alone. Then neighbouring
sums are added in pairs, in float32, as in a binary tree. The total is rounded once:

    rank 0: segments 0 1 2 3 -> 0+1, 2+3 -> (0+1) + (2+3) --+
    rank 1: segments 4 5 6 7 -> 4+5, 6+7 -> (4+5) + (6+7) --+-- all-gather --> rank 0 + rank 1

All ranks hold equally many whole segments. A rank's sum is a subtree, so the tree is the same for
any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from quire.layers.async_tp import HalvesGroup
from quire.ops.experts import ExpertWeights, Routed, Swiglu
from quire.ops.reference.quantized import quantize_rows, row_scales
from quire.ops.segments import add_pairs, expert_segments, segment_sum
from quire.ops.weight import Weight, WeightFormat
from quire.parallel import ProcessGroup

SEGMENTS = 8
"""Segments of a layer's inputs. There can be no more ranks than segments."""
_TOKENS = 512
"""Tokens whose float32 sums are gathered at once. This bounds the memory for the sums."""


def segment_count(inputs: int, form: WeightFormat) -> int:
    """Returns the number of segments of a whole layer's inputs.

    It is `SEGMENTS`, or fewer where a segment would split a group of inputs that share a scale.
    """
    unit = form.group or (8 if form.bits else 1)
    count = SEGMENTS
    while count > 1 and inputs % (count * unit):
        count //= 2
    return count


def row_parallel(
    x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None, inputs: int,
    group: ProcessGroup,
) -> Tensor:  # fmt: skip
    """Returns residual + x Wᵀ + bias, [T, outputs], of a row-parallel layer.

    Args:
        x: [T, this rank's inputs].
        weight: this rank's columns.
        bias: [outputs] or None.
        residual: [T, outputs] or None.
        inputs: inputs of the whole layer.
        group: the ranks that share the inputs.
    """
    own = segment_count(inputs, weight.format) // group.world
    x, weight = _round_whole_tokens(x, weight, group)
    if group.world == 1:
        return segment_sum(x, weight, own, x.dtype, bias, residual)
    wide = torch.promote_types(x.dtype, torch.float32)
    return _add_in_order(
        lambda part: segment_sum(x[part], weight, own, wide),
        x.new_empty(len(x), weight.outputs), bias, residual, group,
    )  # fmt: skip


def experts_in_order(
    routed: Routed, up: ExpertWeights, down: ExpertWeights, act: Swiglu, residual: Tensor | None,
    width: int, group: ProcessGroup,
) -> Tensor:  # fmt: skip
    """Returns residual + the weighted sum of each token's experts, [T, hidden].

    Args:
        routed: inputs, expert ids and weights.
        up: this rank's part of the experts' first projection.
        down: this rank's part of their second projection.
        act: the gated activation.
        residual: [T, hidden] or None.
        width: hidden units of a whole expert.
        group: the ranks that share the hidden units.
    """
    own = segment_count(width, down.weight.format) // group.world
    out = torch.empty_like(routed.x)

    def sums(part: slice) -> Tensor:
        x, ids, weights = (tensor[part] for tensor in routed)
        parts = expert_segments(x, ids, weights, up, down, act, own)
        return add_pairs(parts, parts.dtype) if group.world > 1 else parts

    return _add_in_order(sums, out, None, residual, group)


def _add_in_order(
    sums: Callable[[slice], Tensor], out: Tensor, bias: Tensor | None, residual: Tensor | None,
    group: ProcessGroup,
) -> Tensor:  # fmt: skip
    """Fills and returns `out` [T, N]: the sum over all ranks, plus bias, plus residual.

    Args:
        sums: returns this rank's float32 sums for a range of tokens.
        out: uninitialized.
        bias: [N] or None.
        residual: [T, N] or None.
        group: the ranks.
    """
    parts = [slice(first, first + _TOKENS) for first in range(0, len(out), _TOKENS)]

    def finish(part: slice, own: Tensor) -> None:
        added = None if residual is None else residual[part]
        if group.world == 1:
            out[part] = add_pairs(own, out.dtype, bias, added)
        else:
            out[part] = _add_ranks(own, group, out.dtype, bias, added)

    if isinstance(group, HalvesGroup) and group.overlapping and residual is not None:
        # Collectives run on the side stream, so all of this rank's sums are launched first.
        owns = [sums(part) for part in parts]
        group.overlap(lambda: list(map(finish, parts, owns)))
    else:
        for part in parts:
            finish(part, sums(part))
    return out


def _add_ranks(
    own: Tensor, group: ProcessGroup, dtype: torch.dtype, bias: Tensor | None,
    residual: Tensor | None,
) -> Tensor:  # fmt: skip
    """Returns the sum of all ranks' `own` [T, N], plus bias, plus residual, rounded to `dtype`."""
    return add_pairs(group.all_gather(own.unsqueeze(0), 0), dtype, bias, residual)


def _round_whole_tokens(x: Tensor, weight: Weight, group: ProcessGroup) -> tuple[Tensor, Weight]:
    """Rounds inputs with one scale per token, taken over the inputs of all ranks.

    Returns the rounded inputs and a weight that expects rounded inputs. Both are unchanged if the
    format does not round inputs by token.
    """
    form = weight.format
    if form.inputs != "token":
        return x, weight
    top = group.all_gather(x.abs().amax(1, keepdim=True), 1)
    scales = row_scales(top, form.values)
    rounded = (quantize_rows(x, scales, form.values).float() * scales).to(x.dtype)
    return rounded, replace(weight, format=replace(form, inputs="none"))
