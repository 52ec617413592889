"""Rounds a rank's inputs by group if the border between two ranks splits a group.

A group's scale comes from its largest input on any rank.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.reference.quantized import quantize_rows, row_scales
from quire.ops.weight import Weight
from quire.parallel import ProcessGroup


def round_split_groups(x: Tensor, weight: Weight, group: ProcessGroup) -> tuple[Tensor, Weight]:
    """Returns inputs rounded as a single rank would round them, and a weight for rounded inputs.

    Args:
        x: [T, this rank's inputs].
        weight: its format rounds inputs by group.
        group: the ranks that share the layer's inputs.
    """
    form, share = weight.format, x.shape[1]
    behind = -(weight.first + share) % form.group
    parts = F.pad(x, (weight.first, behind)).view(len(x), -1, form.group)
    tops = parts.abs().amax(2)
    # Other ranks may hold parts of this rank's first group and last group, but of no others.
    ends = group.all_gather(torch.stack((tops[:, 0], tops[:, -1]), 1), 1)
    firsts = [rank * share // form.group for rank in range(group.world)]
    lasts = [(rank * share + share - 1) // form.group for rank in range(group.world)]
    places = [place for pair in zip(firsts, lasts, strict=True) for place in pair]
    for own, place in ((0, firsts[group.rank]), (-1, lasts[group.rank])):
        begin = places.index(place)
        tops[:, own] = ends[:, begin : begin + places.count(place)].amax(1)
    scales = row_scales(tops.flatten().unsqueeze(1), form.values)
    rows = parts.view(-1, form.group)
    out = (quantize_rows(rows, scales, form.values).float() * scales).to(x.dtype)
    out = out.view(len(x), -1)[:, weight.first : weight.first + share].contiguous()
    return out, replace(weight, format=replace(form, inputs="none"))
