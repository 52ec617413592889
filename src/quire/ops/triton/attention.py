"""Paged attention for mixed batches: rows of any length against a block-paged KV cache.

Two launches share one kernel. Short rows (decode, drafts) take one tile each and split their KV
over programs, with a combine step. Long rows take many tiles and no split. Which row goes where is
decided on the device from `query_start` and `seq_lens`; grids follow from static bounds alone
(token bucket, row bucket, `max_q_len`), so that one CUDA graph serves any mix within a bucket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from quire.ops.triton.attention_kernels import attend, combine
from quire.ops.triton.launch import DeviceTraits, options, traits

_LOG2E = math.log2(math.e)
_SHORT_TILE = 64
"""If all rows of a bucket fit a tile of this many queries, no launch for long rows is needed."""


@dataclass(frozen=True)
class Tiles:
    """A tile of `m` (token, head) pairs against `n` KV positions at a time."""

    m: int
    n: int
    warps: int
    stages: int


@dataclass(frozen=True)
class AttentionTuning:
    """Measured choices, by default made from the shapes. splits: programs per row and KV head in
    decode. min_tiles: least KV tiles a split gets. pdl, upcast: None means what the card has;
    upcast computes in fp32 where tensor cores do not take bf16. fixed: one kernel, one tile and one
    order of summation for every row, whatever else is in the batch."""

    decode: Tiles | None = None
    prefill: Tiles | None = None
    splits: int | None = None
    min_tiles: int = 1
    pdl: bool | None = None
    upcast: bool | None = None
    fixed: bool = False


DEFAULT = AttentionTuning()


def decode_tiles(queries: int, d_pad: int, element_size: int, card: DeviceTraits) -> Tiles:
    """queries: (token, head) pairs of the longest short row."""
    m = max(16, triton.next_power_of_2(queries))
    n = 64 if d_pad * element_size <= 256 and card.capability >= (8, 0) else 32
    stages = 3 if card.capability >= (8, 0) else 1
    return Tiles(m, n, 4, stages)


def prefill_tiles(d_pad: int, element_size: int, card: DeviceTraits) -> Tiles:
    if element_size > 2 or card.capability < (8, 0):
        # No tensor cores for these: the product is done by FMAs, out of registers.
        return Tiles(32, 32 if d_pad <= 128 else 16, 4, 1)
    if card.shared_memory < 160 * 1024:
        return Tiles(64, 32 if d_pad <= 128 else 16, 4, 2)
    if d_pad > 128:
        return Tiles(128, 64 if card.shared_memory >= 200 * 1024 else 32, 8, 2)
    if card.shared_memory < 200 * 1024:
        return Tiles(128, 64, 4 if d_pad <= 64 else 8, 3)
    return Tiles(128, 128, 8, 2)


def decode_splits(rows: int, kv_heads: int, max_seq_len: int, block_n: int, num_sms: int) -> int:
    """One where rows alone nearly fill the card (splitting them was measured slower); else enough
    programs to fill it about four times over, at most one per KV tile."""
    programs = rows * kv_heads
    if 10 * programs >= 9 * num_sms:
        return 1
    wanted = triton.cdiv(4 * num_sms, programs)
    return int(max(1, min(wanted, triton.cdiv(max_seq_len, block_n), 64)))


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    q_lens: Sequence[int] = (),
    max_q_len: int,
    max_seq_len: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    scratch: object = None,
    tuning: AttentionTuning = DEFAULT,
) -> Tensor:
    """Causal attention of each row's last `q_len` positions over its `seq_len` stored ones.

    q: [T, heads, D], the last dimension dense. k_cache, v_cache: [blocks, kv_heads, block_size, D]
    views of any block, head and token stride; block_size a power of two. query_start: int32
    [R + 1], rows of length 0 are padding. seq_lens: int32 [R], this step's tokens included.
    block_table: int32 [R, max_blocks]. q_lens and scratch are not used.
    max_q_len, max_seq_len: host bounds. window: positions a query sees, itself included. softcap:
    logits become `cap * tanh(logit / cap)`. Returns [T, heads, D]; rows of padding are undefined.
    """
    del q_lens, scratch
    card = traits(q.device)
    tokens, heads, head_dim = q.shape
    rows, kv_heads = seq_lens.shape[0], k_cache.shape[1]
    out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    if tokens == 0 or rows == 0:
        return out
    group = heads // kv_heads
    d_pad = max(16, triton.next_power_of_2(head_dim))
    upcast = not card.bf16 and q.dtype == torch.bfloat16
    upcast = upcast if tuning.upcast is None else tuning.upcast
    width = 4 if upcast else q.element_size()
    max_q_len = min(max_q_len, tokens)
    shape = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "D_PAD": d_pad,
        "WINDOW": window is not None,
        "PDL": card.pdl if tuning.pdl is None else tuning.pdl,
    }
    launch = _Launch(
        (q, k_cache, v_cache, out, query_start, seq_lens, block_table),
        (scale * _LOG2E, 0.0) if softcap is None else (2.0 * scale / softcap, softcap * _LOG2E),
        window or 0,
        {
            **shape,
            "PAGE": k_cache.shape[2],
            "SOFTCAP": softcap is not None,
            "UPCAST": upcast,
            "PRECISION": "ieee" if width == 4 else "tf32",
        },
    )
    long_tiles = tuning.prefill or prefill_tiles(d_pad, width, card)
    if tuning.fixed:
        launch.long_rows(long_tiles, shortest=1, one_loop=True)
        return out
    fits = max_q_len * group <= _SHORT_TILE
    queries = max_q_len * group if fits else group
    tiles = tuning.decode or decode_tiles(queries, d_pad, width, card)
    splits = tuning.splits or decode_splits(rows, kv_heads, max_seq_len, tiles.n, card.num_sms)
    longest = max(1, tiles.m // group)
    launch.short_rows(tiles, splits, longest, tuning.min_tiles, min(longest, max_q_len), shape)
    if max_q_len > longest:
        launch.long_rows(long_tiles, shortest=longest + 1)
    return out


@dataclass(frozen=True)
class _Launch:
    """The arguments that both launches share."""

    tensors: tuple[Tensor, ...]
    scales: tuple[float, float]
    window: int
    constants: dict[str, object]

    def short_rows(
        self,
        tiles: Tiles,
        splits: int,
        longest: int,
        min_tiles: int,
        tokens: int,
        shape: dict[str, object],
    ) -> None:
        """Rows of 1 to `longest` tokens; `tokens` bounds what this bucket can hold of that."""
        q, k_cache, _, out, query_start, seq_lens, _ = self.tensors
        rows, kv_heads, head_dim = seq_lens.shape[0], k_cache.shape[1], q.shape[2]
        partial = lse = out
        if splits > 1:
            parts = rows * kv_heads * splits * tiles.m
            partial = torch.empty(parts * head_dim, dtype=torch.float32, device=q.device)
            lse = torch.empty(parts, dtype=torch.float32, device=q.device)
        grid = (kv_heads, rows, splits)
        # One masked loop: two would drain the pipeline in between, and decode is all pipeline.
        self._attend(grid, partial, lse, tiles, 1, longest, splits > 1, min_tiles, one_loop=True)
        if splits == 1:
            return
        group = q.shape[1] // kv_heads
        combine[(rows, kv_heads, tokens * group)](
            partial, lse, out, query_start, seq_lens, splits, self.window,
            out.stride(0), out.stride(1),
            BM=tiles.m, BN=tiles.n, MAX_Q=longest, MIN_TILES=min_tiles, **shape,
            **options(bool(shape["PDL"]), num_warps=2),
        )  # fmt: skip

    def long_rows(self, tiles: Tiles, shortest: int, one_loop: bool = False) -> None:
        """Rows of at least `shortest` tokens."""
        q, k_cache, _, out, _, seq_lens, _ = self.tensors
        tokens, heads, _ = q.shape
        kv_heads = k_cache.shape[1]
        most = tokens * (heads // kv_heads) // tiles.m + seq_lens.shape[0]
        self._attend((kv_heads, most, 1), out, out, tiles, shortest, 0, False, 1, one_loop)

    def _attend(
        self,
        grid: tuple[int, int, int],
        partial: Tensor,
        lse: Tensor,
        tiles: Tiles,
        shortest: int,
        longest: int,
        split: bool,
        min_tiles: int,
        one_loop: bool,
    ) -> None:
        q, k_cache, v_cache, out, query_start, seq_lens, table = self.tensors
        attend[grid](
            q, k_cache, v_cache, out, partial, lse, query_start, seq_lens, table,
            seq_lens.shape[0], *self.scales, self.window,
            q.stride(0), q.stride(1), out.stride(0), out.stride(1),
            *k_cache.stride()[:3], *v_cache.stride()[:3], table.stride(0),
            BM=tiles.m, BN=tiles.n, MIN_Q=shortest, MAX_Q=longest, SPLIT=split,
            MIN_TILES=min_tiles, ONE_LOOP=one_loop, **self.constants,
            **options(bool(self.constants["PDL"]), num_warps=tiles.warps, num_stages=tiles.stages),
        )  # fmt: skip
