"""Attention over the paged cache, with optional attention sinks.

A sink is a score per head that takes part in the softmax and has no value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.arguments import Scratch
from quire.ops.kv import AttentionHeads, KVFormat, KVLayer
from quire.ops.reference import kv8
from quire.ops.reference.cache import head_rows, host_reads


def softmax(scores: Tensor, sinks: Tensor) -> Tensor:
    """Returns exp(scores) / (exp(sink) + the sum of exp(scores)) over the last axis (Xiao et al.
    2023; learned, as in gpt-oss).

    Args:
        scores: [P, Hkv, M, context]; M counts the query heads of a KV head, each with equally many
            queries.
        sinks: [Hq].
    """
    own = sinks.to(scores.dtype).view(1, scores.shape[1], -1)
    own = own.repeat_interleave(scores.shape[2] // own.shape[2], 2)
    own = own.unsqueeze(3).expand(len(scores), -1, -1, -1)
    return torch.cat((scores, own), 3).softmax(3)[..., :-1]


# Attention over the paged cache, by gathering blocks and masking.

_TILE = 256
"""Most queries of one piece. The bound limits the size of the mask, and avoids most (query, key)
pairs that causality hides."""
_BATCHED = 16
"""Most queries of pieces that share a bucket."""
_BUCKET_BYTES = 4 << 20
"""Most bytes of keys that a bucket of several pieces gathers, to stay in the CPU's cache."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A run of tokens of one row.

    Attributes:
        start: the first token's index in the batch.
        queries: number of tokens.
        behind: number of the row's later tokens, after the run.
        blocks: upper bound of the number of cache blocks that the run sees.
    """

    row: int
    start: int
    queries: int
    behind: int
    blocks: int


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Pieces of rows that are computed together.

    Attributes:
        pieces: P, the number of pieces.
        queries: number of tokens of each piece.
        tokens: indices [P * queries] of the tokens, or a slice if they are contiguous.
        blocks: int64 [P * Hkv * n], indices of rows of `head_rows`, for keys and for values.
        mask: 0 or -inf, [P, 1, queries, n * BS].
    """

    pieces: int
    queries: int
    tokens: slice | Tensor
    blocks: Tensor
    mask: Tensor


def attention_schedule(
    query_start: Tensor,
    seq_lens: Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kv_format: KVFormat,
    tokens: int,
    max_q_len: int,
    window: int | None = None,
    even: bool | None = None,
) -> Any:
    """Returns a schedule of `paged_attention` for a step's rows.

    All layers with these shapes and this window share it, in their `scratch` under "schedule". The
    twin returns None, because its first layer splits the work by `q_lens`, on the host.

    Args:
        query_start: see `paged_attention`.
        seq_lens: see `paged_attention`.
        heads: query heads of this rank.
        kv_heads: KV heads of this rank.
        head_dim: D.
        dtype: dtype of the queries.
        kv_format: format of stored keys and values.
        tokens: T, padding included.
        max_q_len: see `paged_attention`.
        window: see `paged_attention`.
        even: whether each row's KV may stay whole, because no row has more than `most_skew` times
            the mean. None if that is unknown.
    """
    return None


def most_skew(seq_lens: Tensor, attention: AttentionHeads) -> float | None:
    """Returns how often the mean length a decode may have if all decodes' KV is to stay whole.

    Returns None if the schedule does not depend on `even`.

    Args:
        seq_lens: int32 [R], of which only the size counts.
        attention: the attention of the layers.
    """
    return None


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
    """Computes causal attention of each row's last tokens over the row's cached context.

    Returns [T, Hq, D]; undefined for padding tokens.

    Args:
        q: [T, Hq, D]. Row r's tokens start at query_start[r]. They are the last q_lens[r] of its
            seq_lens[r] positions, and their k and v are in the cache already.
        kv: stored keys and values. All values must be finite, also those that were never written.
        block_table: int32 [R, max_blocks].
        q_lens: lengths of the rows, known to the host.
        max_q_len: upper bound of `q_lens`.
        max_seq_len: upper bound of `seq_lens`.
        window: a token sees itself and the window - 1 tokens before it (Beltagy et al. 2020).
        softcap: scores become softcap * tanh(score / softcap) (Gemma Team 2024).
        sinks: [Hq], a score of each head that joins the softmax and has no value.
    """
    scratch = {} if scratch is None else scratch
    key = ("attention", block_table.data_ptr(), kv.k.shape, kv.k.stride(0), window, q.dtype)
    plan: list[_Bucket] | None = scratch.get(key)
    if plan is None:
        pieces = _pieces(q_lens, seq_lens, max_seq_len, window, kv.k.shape[2])
        block_bytes = kv.k.shape[1:].numel() * q.element_size()
        plan = scratch[key] = [
            _bucket(group, seq_lens, block_table, kv.k, window, q.dtype)
            for group in _group(pieces, block_bytes)
        ]
    workspace = scratch.setdefault("workspace", {})
    if len(plan) == 1 and plan[0].tokens == slice(0, q.shape[0]):
        return _attend(q, kv, plan[0], workspace, scale, softcap, sinks)
    out = q.new_zeros(q.shape)
    for bucket in plan:
        own = q[bucket.tokens]
        out[bucket.tokens] = _attend(own, kv, bucket, workspace, scale, softcap, sinks)
    return out


def _pieces(
    q_lens: Sequence[int], seq_lens: Tensor, max_seq_len: int, window: int | None, size: int
) -> list[_Piece]:
    # If reading the lengths would make the host wait for a device, the host uses its upper bound.
    known = host_reads(seq_lens)
    lengths = seq_lens.tolist() if known else [max_seq_len] * len(q_lens)
    pieces = []
    row_start = 0
    for row, q_len in enumerate(q_lens):
        for first in range(0, q_len, _TILE):
            queries = min(_TILE, q_len - first)
            behind = q_len - first - queries
            end = lengths[row] - behind
            blocks = -(-end // size)
            if window is not None and known:
                blocks -= max(0, end - queries - window + 1) // size
            elif window is not None:
                blocks = min(blocks, -(-(window - 1 + queries) // size) + 1)
            pieces.append(_Piece(row, row_start + first, queries, behind, max(1, blocks)))
        row_start += q_len
    return pieces


def _group(pieces: list[_Piece], block_bytes: int) -> list[list[_Piece]]:
    """Groups pieces with equally many queries and contexts within a factor of two."""
    groups: list[list[_Piece]] = []
    for piece in sorted(pieces, key=lambda piece: (piece.queries, -piece.blocks)):
        if groups:
            group = groups[-1]
            longest = group[0].blocks
            if (
                piece.queries == group[0].queries <= _BATCHED
                and longest <= 2 * piece.blocks
                and (len(group) + 1) * longest * block_bytes <= _BUCKET_BYTES
            ):
                group.append(piece)
                continue
        groups.append([piece])
    return groups


def _bucket(
    pieces: list[_Piece],
    seq_lens: Tensor,
    block_table: Tensor,
    cache: Tensor,
    window: int | None,
    dtype: torch.dtype,
) -> _Bucket:
    device = seq_lens.device
    count, queries, blocks = len(pieces), pieces[0].queries, pieces[0].blocks
    size = cache.shape[2]
    pieces.sort(key=lambda piece: piece.start)

    host = torch.tensor([[piece.row, piece.behind, piece.start] for piece in pieces])
    rows, behind, starts = host.to(device, non_blocking=True).unbind(1)
    ends = seq_lens.long().index_select(0, rows) - behind
    first = torch.zeros_like(ends)
    if window is not None:
        first = torch.div((ends - queries - window + 1).clamp(min=0), size, rounding_mode="floor")

    columns = first.unsqueeze(1) + torch.arange(blocks, device=device)
    table = block_table.index_select(0, rows)
    ids = table.gather(1, columns.clamp(max=table.shape[1] - 1)).long()
    # Entries past a row's end are undefined: clamp them into the cache, and mask them.
    ids = ids.clamp(0, cache.shape[0] - 1)
    _, step = head_rows(cache)
    heads = torch.arange(cache.shape[1], device=device)
    gathered = (ids.unsqueeze(1) * step + heads.unsqueeze(1)).flatten()

    key = (first * size).unsqueeze(1) + torch.arange(blocks * size, device=device)
    query = (ends - queries).unsqueeze(1) + torch.arange(queries, device=device)
    distance = query.unsqueeze(2) - key.unsqueeze(1)
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)

    tokens: slice | Tensor = slice(pieces[0].start, pieces[0].start + count * queries)
    if any(piece.start != pieces[0].start + i * queries for i, piece in enumerate(pieces)):
        tokens = (starts.unsqueeze(1) + torch.arange(queries, device=device)).flatten()
    return _Bucket(count, queries, tokens, gathered, mask.unsqueeze(1))


def _attend(
    q: Tensor,
    kv: KVLayer,
    bucket: _Bucket,
    workspace: dict[Any, Tensor],
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Returns the attention of a bucket's q [P * queries, Hq, D], in the same shape."""
    count, kv_heads, context = bucket.pieces, kv.k.shape[1], bucket.mask.shape[-1]
    heads, head_dim = q.shape[1:]
    shape = count, kv_heads, context, head_dim
    k = stored_values("k", kv.k, kv.k_scale, kv.format, bucket.blocks, workspace, shape, q.dtype)
    v = stored_values("v", kv.v, kv.v_scale, kv.format, bucket.blocks, workspace, shape, q.dtype)
    if bucket.queries == 1:
        # The query heads that share a KV head are the rows of one product.
        grouped = q.reshape(count, kv_heads, heads // kv_heads, head_dim)
        return _products(grouped, k, v, bucket.mask, scale, softcap, sinks).reshape(q.shape)
    q = q.reshape(count, bucket.queries, heads, head_dim).transpose(1, 2)
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=bucket.mask, scale=scale, enable_gqa=heads != kv_heads
        )
    else:
        grouped = q.reshape(count, kv_heads, -1, head_dim)
        mask = bucket.mask.repeat(1, 1, heads // kv_heads, 1)
        out = _products(grouped, k, v, mask, scale, softcap, sinks).reshape(q.shape)
    return out.transpose(1, 2).flatten(0, 1)


def stored_values(
    name: str,
    cache: Tensor,
    scale: Tensor | None,
    kv_format: KVFormat,
    rows: Tensor,
    workspace: dict[Any, Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Tensor:
    """Returns rows of `head_rows(cache)` as `shape`, [P, Hkv, context, D], in `dtype`."""
    if scale is None:
        return _gather(name, cache, rows, workspace).view(shape).to(dtype)

    def gather(part: str, stored: Tensor) -> Tensor:
        return _gather(part, stored, rows, workspace)

    return kv8.load(name, cache, scale, kv_format, gather, shape).to(dtype)


def _gather(name: str, cache: Tensor, rows: Tensor, workspace: dict[Any, Tensor]) -> Tensor:
    """Returns rows of `head_rows(cache)`, in memory that the next layer reuses.

    On a CPU the page faults of fresh memory take longer than the copy."""
    view, _ = head_rows(cache)
    size = rows.shape[0] * view.shape[1]
    buffer = workspace.get((name, cache.dtype))
    if buffer is None or buffer.numel() < size:
        with torch.inference_mode(False):  # Later calls may fill it inside or outside of that mode.
            buffer = cache.new_empty(size * 5 // 4)
        workspace[name, cache.dtype] = buffer
    out = buffer[:size].view(rows.shape[0], view.shape[1])
    return torch.index_select(view, 0, rows, out=out)


def _products(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Returns softmax(softcap(q kᵀ scale) + mask) v, in float32 or wider; q is [P, Hkv, M, D]."""
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    dtype = q.dtype
    if dtype not in (torch.float32, torch.float64):
        q, k, v, mask = q.float(), k.float(), v.float(), mask.float()
    pieces, kv_heads, rows = q.shape[:3]
    mask = mask.expand(-1, kv_heads, -1, -1).flatten(0, 1)
    q, k, v = q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), v.flatten(0, 1)
    if softcap is None:
        scores = torch.baddbmm(mask, q, k, alpha=scale)
    else:
        scores = torch.bmm(q, k).mul_(scale / softcap).tanh_().mul_(softcap).add_(mask)
    if sinks is None:
        scores = scores.softmax(-1)
    else:
        scores = softmax(scores.view(pieces, kv_heads, rows, -1), sinks).flatten(0, 1)
    return torch.bmm(scores, v).view(pieces, kv_heads, rows, -1).to(dtype)
