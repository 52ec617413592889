"""Which program of decode attention reads which part of whose KV, decided on the device.

All rows' KV is cut into parts of about equal length, as many as fill the card a few times over, so
that neither few long rows nor one among many short ones leaves multiprocessors idle. Longer parts
come first, which shortens the tail. Made once per step, for all layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.triton.launch import options

_OWN = 8
_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Schedule:
    """items: int32 [8, N]. Per item its row (-1: none), the KV positions [start, end) to attend to,
    the row's first item, how many it has, and where its queries begin, how many they are, and the
    first one's position. counters: int32 [N, KV heads], zero; arrivals at a row's first item.
    tile_n: parts are multiples of it, at absolute positions."""

    items: Tensor
    counters: Tensor
    tile_n: int


@triton.jit
def _parts(query_start_ptr, seq_lens_ptr, rows, num_rows, window, longest, WINDOW, BN):
    """Of rows [n]: where their queries begin, how many, the first one's position, the first KV
    position that counts, and the KV tiles from there on (0 where the row is not short)."""
    inside = rows < num_rows
    q_start = tl.load(query_start_ptr + rows, mask=inside, other=0)
    q_len = tl.load(query_start_ptr + rows + 1, mask=inside, other=0) - q_start
    seq_len = tl.load(seq_lens_ptr + rows, mask=inside, other=0)
    first = seq_len - q_len
    start = first * 0
    if WINDOW:
        # Rounded down, so that tiles lie at absolute positions.
        start = tl.maximum(first - window + 1, 0) // BN * BN
    short = inside & (q_len > 0) & (q_len <= longest)
    return q_start, q_len, first, start, tl.where(short, tl.cdiv(seq_len - start, BN), 0)


@triton.jit
def _cut(tiles, span, most):
    """(tiles of each part, parts) of rows of `tiles` KV tiles, in even parts of about `span`."""
    parts = tl.minimum(tl.cdiv(tiles, span), most)
    per = tl.cdiv(tiles, tl.maximum(parts, 1))
    return per, tl.cdiv(tiles, tl.maximum(per, 1))


@triton.jit(do_not_specialize=["num_rows", "num_items", "spare", "longest", "window", "most"])
def _schedule(
    query_start_ptr, seq_lens_ptr, items_ptr, counters_ptr, num_rows, num_items, spare, longest,
    window, most, min_tiles, kv_heads,
    BN: tl.constexpr, OWN: tl.constexpr, AT_ONCE: tl.constexpr, HEADS_PAD: tl.constexpr,
    WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program places OWN rows: behind all rows of longer parts, and of equal ones before."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = 0
    for begin in range(0, num_rows, AT_ONCE):
        rows = begin + tl.arange(0, AT_ONCE)
        _, _, _, _, tiles = _parts(
            query_start_ptr, seq_lens_ptr, rows, num_rows, window, longest, WINDOW, BN
        )
        total += tl.sum(tiles, 0)
    span = tl.maximum(tl.cdiv(total, spare), min_tiles)

    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    q_start, q_len, first, start, tiles = _parts(
        query_start_ptr, seq_lens_ptr, own, num_rows, window, longest, WINDOW, BN
    )
    per, parts = _cut(tiles, span, most)
    place = tl.zeros([OWN], tl.int32)
    placed = 0
    for begin in range(0, num_rows, AT_ONCE):
        rows = begin + tl.arange(0, AT_ONCE)
        _, _, _, _, others = _parts(
            query_start_ptr, seq_lens_ptr, rows, num_rows, window, longest, WINDOW, BN
        )
        other_per, other_parts = _cut(others, span, most)
        tie = (other_per[None, :] == per[:, None]) & (rows[None, :] < own[:, None])
        before = (other_per[None, :] > per[:, None]) | tie
        place += tl.sum(tl.where(before, other_parts[None, :], 0), 1)
        placed += tl.sum(other_parts, 0)
    for part in range(0, tl.max(parts, 0)):
        at = items_ptr + place + part
        mine = part < parts
        from_tile = start + part * per * BN
        tl.store(at, own, mask=mine)
        tl.store(at + num_items, from_tile, mask=mine)
        tl.store(at + 2 * num_items, tl.minimum(from_tile + per * BN, first + q_len), mask=mine)
        tl.store(at + 3 * num_items, place, mask=mine)
        tl.store(at + 4 * num_items, parts, mask=mine)
        tl.store(at + 5 * num_items, q_start, mask=mine)
        tl.store(at + 6 * num_items, q_len, mask=mine)
        tl.store(at + 7 * num_items, first, mask=mine)
    heads = tl.arange(0, HEADS_PAD)
    counters = counters_ptr + place[:, None] * kv_heads + heads[None, :]
    tl.store(counters, 0, mask=(parts > 0)[:, None] & (heads < kv_heads)[None, :])
    if tl.program_id(0) == 0:
        for begin in range(placed, num_items, AT_ONCE):
            at = begin + tl.arange(0, AT_ONCE)
            tl.store(items_ptr + at, -1, mask=at < num_items)


def schedule(
    query_start: Tensor,
    seq_lens: Tensor,
    *,
    kv_heads: int,
    programs: int,
    longest: int,
    tile_n: int,
    min_tiles: int,
    most_parts: int,
    window: int | None,
    pdl: bool,
) -> Schedule:
    """Rows of 1 to `longest` tokens in parts of at least `min_tiles` tiles of `tile_n` positions,
    at most `most_parts` a row. query_start: int32 [R + 1]; seq_lens: int32 [R]. programs: what
    fills the card; a card that rows alone fill gets few parts more than rows."""
    rows, device = seq_lens.shape[0], seq_lens.device
    spare = max(1, programs // kv_heads)
    num_items = rows + spare
    items = torch.empty(8, num_items, dtype=torch.int32, device=device)
    counters = torch.empty(num_items, kv_heads, dtype=torch.int32, device=device)
    _schedule[(triton.cdiv(rows, _OWN),)](
        query_start, seq_lens, items, counters, rows, num_items, spare, longest, window or 0,
        most_parts, min_tiles, kv_heads,
        BN=tile_n, OWN=_OWN, AT_ONCE=_AT_ONCE, HEADS_PAD=triton.next_power_of_2(kv_heads),
        WINDOW=window is not None, PDL=pdl, **options(pdl, num_warps=4),
    )  # fmt: skip
    return Schedule(items, counters, tile_n)
