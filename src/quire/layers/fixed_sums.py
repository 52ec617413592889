"""Layers whose results are the same to the bit, however many ranks share them (`--deterministic`).

The inputs of a layer are `SEGMENTS` segments. Each is summed by itself, then sums of neighbours are
added in pairs, in float32, and the result is rounded once. A rank holds whole segments, as many as
any other, so that its own sum is one of these pairs; those of the ranks are told to all, who add
them up alike.
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
"""Segments of a layer's inputs, and so the most ranks."""
_TOKENS = 512
"""Tokens whose sums in float32 are exchanged at once, to bound the memory for them."""


def segment_count(inputs: int, form: WeightFormat) -> int:
    """Returns how many segments the inputs of a whole layer have: `SEGMENTS`, or fewer where these
    would cut groups of inputs that share a scale."""
    unit = form.group or (8 if form.bits else 1)
    count = SEGMENTS
    while count > 1 and inputs % (count * unit):
        count //= 2
    return count


def row_parallel(
    x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None, inputs: int,
    group: ProcessGroup,
) -> Tensor:  # fmt: skip
    """Returns residual + x Wᵀ + bias, [T, outputs], of a layer whose inputs ranks share. inputs:
    those of the whole layer."""
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
    """Returns residual + the weighted sum of a token's experts, [T, hidden], whose hidden units
    ranks share. width: those of a whole expert."""
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
    """Returns `out` [T, N], filled with what `sums` returns for some tokens, added up over all
    ranks, + bias + residual."""
    parts = [slice(first, first + _TOKENS) for first in range(0, len(out), _TOKENS)]

    def finish(part: slice, own: Tensor) -> None:
        added = None if residual is None else residual[part]
        if group.world == 1:
            out[part] = add_pairs(own, out.dtype, bias, added)
        else:
            out[part] = _add_ranks(own, group, out.dtype, bias, added)

    if isinstance(group, HalvesGroup) and group.overlapping and residual is not None:
        # What ranks tell each other comes behind all of a rank's own work.
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
    """Returns the sum of every rank's `own` [T, N], + bias + residual."""
    return add_pairs(group.all_gather(own.unsqueeze(0), 0), dtype, bias, residual)


def _round_whole_tokens(x: Tensor, weight: Weight, group: ProcessGroup) -> tuple[Tensor, Weight]:
    """Returns inputs that are rounded by a scale for each token, that of the whole token, and a
    weight that asks for no more of it; others as they are."""
    form = weight.format
    if form.inputs != "token":
        return x, weight
    top = group.all_gather(x.abs().amax(1, keepdim=True), 1)
    scales = row_scales(top, form.values)
    rounded = (quantize_rows(x, scales, form.values).float() * scales).to(x.dtype)
    return rounded, replace(weight, format=replace(form, inputs="none"))
