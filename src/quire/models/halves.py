"""Steps of many tokens as two halves, so that sums over ranks run beside the other half's products.

Layer by layer, attention of the first half, that of the second, then the feed-forward layers of
both: each part ends with a sum over ranks, for which there is time while the other half's part is
computed. The first half stands in front, and its KV is stored before the second half's attention
reads it, so halves may cut a request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from quire.layers.batch import ForwardBatch, GroupBatch
from quire.layers.residual import Residual
from quire.parallel import ProcessGroup
from quire.parallel.halves import HalvesGroup

_UNIT = 64
"""Tokens that the first half is a multiple of, as tiles of products are."""


def run_halves(
    group: ProcessGroup, hidden: Tensor, batch: ForwardBatch,
    layers_for: Callable[[ForwardBatch], Sequence[Any]],
) -> Tensor:  # fmt: skip
    """Returns what `DecoderLayers.run` does, of layers that are all a `Block`. group: a
    `HalvesGroup`, which the layers share. layers_for: see `DecoderLayers.layers_for`."""
    group = cast(HalvesGroup, group)
    first = first_half(len(hidden))
    parts = split_batch(batch, first)
    layers = [layers_for(part) for part in parts]
    streams = [Residual(hidden[:first]), Residual(hidden[first:])]
    with group.halves():
        for pair in zip(*layers, strict=True):
            for half, (block, own, cache) in enumerate(pair):
                group.turn(half)
                streams[half] = block.attention(
                    streams[half], block.attention_norm, parts[half], own, cache
                )
            for half, (block, _, _) in enumerate(pair):
                group.turn(half)
                streams[half] = block.mlp(streams[half], block.mlp_norm, parts[half])
    return torch.cat([stream.total() for stream in streams])


def first_half(tokens: int) -> int:
    """Returns how many of a step's tokens are its first half."""
    return tokens // 2 // _UNIT * _UNIT or tokens // 2


def split_batch(batch: ForwardBatch, first: int) -> tuple[ForwardBatch, ForwardBatch]:
    """Returns the first tokens of a batch, and the others, with all rows in both. A row that has no
    tokens there has length 0, as padding has."""
    count = len(batch.input_ids)
    starts = batch.query_start.clamp(max=first), (batch.query_start - first).clamp(min=0)
    behind = starts[1].diff()
    q_lens = tuple(_ahead(batch.q_lens, first))
    others = tuple(whole - own for whole, own in zip(batch.q_lens, q_lens, strict=True))
    lengths = (
        (batch.seq_lens - behind).where(starts[0].diff() > 0, 0),
        batch.seq_lens.where(behind > 0, 0),
    )

    def part(index: int, low: int, high: int, q_lens: tuple[int, ...]) -> ForwardBatch:
        return replace(
            batch,
            input_ids=batch.input_ids[low:high],
            positions=batch.positions[low:high],
            query_start=starts[index],
            seq_lens=lengths[index],
            groups=tuple(GroupBatch(own.slots[low:high], own.block_table) for own in batch.groups),
            q_lens=q_lens,
            max_q_len=min(batch.max_q_len, high - low),
        )

    return part(0, 0, first, q_lens), part(1, first, count, others)


def _ahead(q_lens: Sequence[int], first: int) -> list[int]:
    """Returns how many of each row's tokens are among the first of all."""
    found = []
    for length in q_lens:
        found.append(min(length, first))
        first -= found[-1]
    return found
