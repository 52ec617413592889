"""Layers whose inputs ranks share, and round by a scale for each group, where a rank's share cuts
groups: a group has the scale of its largest number on any rank."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.reference.quantized import quantize_rows, row_scales
from quire.ops.weight import Weight
from quire.parallel import ProcessGroup


def rounded(x: Tensor, weight: Weight, group: ProcessGroup) -> tuple[Tensor, Weight]:
    """Returns x [T, a rank's inputs] rounded as one rank alone would round it, and a weight that
    asks for no more of it."""
    form, share = weight.format, x.shape[1]
    behind = -(weight.first + share) % form.group
    parts = F.pad(x, (weight.first, behind)).view(len(x), -1, form.group)
    tops = parts.abs().amax(2)
    # Only the first and the last group of a rank may lie on others too.
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
