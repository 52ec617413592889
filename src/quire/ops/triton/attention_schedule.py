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

from quire.ops.triton.launch import launch, options

_OWN = 8
_AT_ONCE = 256


@dataclass(frozen=True)
class Tiles:
    """A tile of `m` (token, head) pairs against `n` KV positions at a time. registers: most that a
    thread may have, None: as the compiler likes."""

    m: int
    n: int
    warps: int
    stages: int
    registers: int | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """items: int32 [N, 8]. Per item its row (-1: none), the KV positions [start, end) to attend to,
    where the row's queries begin, how many they are, the first one's position, how many items the
    row has, and nothing. rows: int32 [2, R]. Each row's first item, the others follow it, and how
    many. tiles: of the kernel that follows it; parts are multiples of its n, at absolute positions.
    longest: tokens of a short row at most. parts: whether a row may have several."""

    items: Tensor
    rows: Tensor
    tiles: Tiles
    longest: int
    parts: bool


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


@triton.jit
def _placed(own, per, rows, tiles, span, most):
    """How many items of rows [n] of `tiles` stand before those of rows `own`, which have `per`
    tiles in each of their parts; and how many items the rows [n] have."""
    other_per, parts = _cut(tiles, span, most)
    tie = (other_per[None, :] == per[:, None]) & (rows[None, :] < own[:, None])
    before = (other_per[None, :] > per[:, None]) | tie
    return tl.sum(tl.where(before, parts[None, :], 0), 1), tl.sum(parts, 0)


@triton.jit(
    do_not_specialize=["num_rows", "num_items", "spare", "longest", "window", "min_tiles", "most"]
)
def _schedule(
    query_start_ptr, seq_lens_ptr, items_ptr, rows_ptr, num_rows, num_items, spare, longest,
    window, min_tiles, most,
    BN: tl.constexpr, OWN: tl.constexpr, AT_ONCE: tl.constexpr, ONCE: tl.constexpr,
    WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program places OWN rows: behind all rows of longer parts, and of equal ones before.
    ONCE: there are no more than AT_ONCE rows."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    rows = tl.arange(0, AT_ONCE)
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    q_start, q_len, first, start, own_tiles = _parts(
        query_start_ptr, seq_lens_ptr, own, num_rows, window, longest, WINDOW, BN
    )
    _, _, _, _, tiles = _parts(
        query_start_ptr, seq_lens_ptr, rows, num_rows, window, longest, WINDOW, BN
    )
    total = tl.sum(tiles, 0)
    if not ONCE:
        for begin in range(AT_ONCE, num_rows, AT_ONCE):
            _, _, _, _, more = _parts(
                query_start_ptr, seq_lens_ptr, begin + rows, num_rows, window, longest, WINDOW, BN
            )
            total += tl.sum(more, 0)
    span = tl.maximum(tl.cdiv(total, spare), min_tiles)
    per, parts = _cut(own_tiles, span, most)
    place, placed = _placed(own, per, rows, tiles, span, most)
    if not ONCE:
        for begin in range(AT_ONCE, num_rows, AT_ONCE):
            _, _, _, _, more = _parts(
                query_start_ptr, seq_lens_ptr, begin + rows, num_rows, window, longest, WINDOW, BN
            )
            more_place, more_placed = _placed(own, per, begin + rows, more, span, most)
            place += more_place
            placed += more_placed
    tl.store(rows_ptr + own, place, mask=own < num_rows)
    tl.store(rows_ptr + num_rows + own, parts, mask=own < num_rows)
    for part in range(0, tl.max(parts, 0)):
        at = items_ptr + (place + part) * 8
        mine = part < parts
        begin_at = start + part * per * BN
        end_at = tl.minimum(begin_at + per * BN, first + q_len)
        tl.store(at, own, mask=mine)
        tl.store(at + 1, begin_at, mask=mine)
        tl.store(at + 2, end_at, mask=mine)
        tl.store(at + 3, q_start, mask=mine)
        tl.store(at + 4, q_len, mask=mine)
        tl.store(at + 5, first, mask=mine)
        tl.store(at + 6, parts, mask=mine)
    if tl.program_id(0) == 0:
        for begin in range(placed, num_items, AT_ONCE):
            at = begin + tl.arange(0, AT_ONCE)
            tl.store(items_ptr + at * 8, -1, mask=at < num_items)


def schedule(
    query_start: Tensor,
    seq_lens: Tensor,
    *,
    kv_heads: int,
    programs: int,
    longest: int,
    tiles: Tiles,
    min_tiles: int,
    most_parts: int,
    window: int | None,
    pdl: bool,
) -> Schedule:
    """Rows of 1 to `longest` tokens in parts of at least `min_tiles` of the KV tiles,
    at most `most_parts` a row. query_start: int32 [R + 1]; seq_lens: int32 [R]. programs: what
    fills the card: rows are cut so that there are up to that many more programs than rows alone
    make."""
    num_rows, device = seq_lens.shape[0], seq_lens.device
    spare = programs // kv_heads if most_parts > 1 else 0
    num_items = num_rows + spare
    items = torch.empty(num_items, 8, dtype=torch.int32, device=device)
    rows = torch.empty(2, num_rows, dtype=torch.int32, device=device)
    at_once = min(_AT_ONCE, max(32, triton.next_power_of_2(num_rows)))
    launch(_schedule, (triton.cdiv(num_rows, _OWN),))(
        query_start, seq_lens, items, rows, num_rows, num_items, max(spare, 1), longest,
        window or 0, min_tiles, most_parts if spare else 1,
        BN=tiles.n, OWN=_OWN, AT_ONCE=at_once, ONCE=num_rows <= at_once,
        WINDOW=window is not None, PDL=pdl,
        **options(pdl, num_warps=1 if num_rows <= 32 else 4),
    )  # fmt: skip
    return Schedule(items, rows, tiles, longest, spare > 0)
