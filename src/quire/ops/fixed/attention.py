"""Attention over the paged cache, one row and KV head at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.arguments import Scratch
from quire.ops.fixed.products import products, wider
from quire.ops.kv import KVLayer
from quire.ops.reference.attention import stored_values
from quire.ops.reference.cache import head_rows

_TILE = 64
"""Positions of a tile, whose weights are added up at once. Tiles start at multiples of this number,
so a tile outside of a token's window adds only zeros."""


def paged_attention(
    q: Tensor,
    kv: KVLayer,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    q_lens: Sequence[int],
    max_q_len: int,
    max_seq_len: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scratch: Scratch | None = None,
) -> Tensor:
    """See `reference.paged_attention`."""
    workspace = {} if scratch is None else scratch.setdefault("workspace", {})
    heads, kv_heads = q.shape[1], kv.k.shape[1]
    group = heads // kv_heads
    out = torch.zeros_like(q)
    first = 0
    for row, count in enumerate(q_lens):
        if not count:
            continue
        tokens = slice(first, first + count)
        first += count
        length = int(seq_lens[row])
        k, v = _context(kv, block_table[row], length, workspace, wider(q.dtype))
        position = torch.arange(length - count, length).unsqueeze(1)
        distance = position - torch.arange(k.shape[1])
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        hidden = hidden.repeat_interleave(group, 0)
        for head in range(kv_heads):
            own = slice(head * group, (head + 1) * group)
            queries = q[tokens, own].reshape(count * group, -1).to(k.dtype)
            scores = products(queries, k[head]) * scale
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            scores.masked_fill_(hidden, -torch.inf)
            sink = None
            if sinks is not None:
                sink = sinks[own].to(k.dtype).repeat(count)
            mean = _mean(scores, v[head], sink)
            out[tokens, own] = mean.view(count, group, -1).to(q.dtype)
    return out


def _context(
    kv: KVLayer, blocks: Tensor, length: int, workspace: dict[Any, Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns a row's keys and values, [Hkv, n, D].

    n is a multiple of `_TILE`; values past the row's end are arbitrary finite numbers."""
    kv_heads, size = kv.k.shape[1:3]
    ids = blocks[: -(-length // size)].long().clamp(0, len(kv.k) - 1)
    _, step = head_rows(kv.k)
    rows = (ids * step + torch.arange(kv_heads).unsqueeze(1)).flatten()
    shape = 1, kv_heads, len(ids) * size, kv.k.shape[3]
    behind = (0, 0, 0, -shape[2] % _TILE)
    k = stored_values("k", kv.k, kv.k_scale, kv.format, rows, workspace, shape, dtype)
    v = stored_values("v", kv.v, kv.v_scale, kv.format, rows, workspace, shape, dtype)
    return F.pad(k[0], behind), F.pad(v[0], behind)


def _mean(scores: Tensor, v: Tensor, sink: Tensor | None) -> Tensor:
    """Returns softmax(scores) v, [M, D].

    Args:
        scores: [M, n].
        v: [n, D].
        sink: [M].
    """
    top = scores.amax(1)
    if sink is not None:
        top = torch.maximum(top, sink)
    weights = (scores - top.unsqueeze(1)).exp_()
    tiles = weights.view(len(weights), -1, _TILE).sum(2)
    total = torch.zeros_like(top) if sink is None else (sink - top).exp_()
    for tile in tiles.unbind(1):
        total += tile
    return products(weights, v.t(), _TILE) / total.unsqueeze(1)
