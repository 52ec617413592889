"""A device-side schedule: which program of attention reads each part of each row's KV.

The KV of short rows is cut into parts of about equal length. There are enough parts to fill the
card a few times. So no multiprocessors are idle if there are few rows with much KV, or one long row
among many others. In steps of few tokens, the KV of long rows' tiles is cut too, into parts that
all run at once. Longer parts start first, so that all programs end at about the same time. A step
makes its schedule once, for all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.triton.launch import launch, metadata_options

OWN = 8
_FEWEST = tl.constexpr(2)
"""The fewest KV tiles of a part of a long row. A part's overhead is the time of about one tile."""
_AT_ONCE = 256


@dataclass(frozen=True)
class Tiles:
    """The tile of an attention program.

    Attributes:
        m: number of (token, head) pairs.
        n: number of KV positions of one iteration.
        warps: warps of a program.
        stages: tiles in flight.
        registers: the most registers of a thread; None leaves the choice to the compiler.
    """

    m: int
    n: int
    warps: int
    stages: int
    registers: int | None = None


@dataclass(frozen=True, slots=True)
class LongSchedule:
    """The schedule of long rows.

    The words of an item are, in this order:

    * The row, or -1 for an unused item.
    * The index of this part of the tile's KV.
    * The number of KV tiles of a part.
    * The row's first query.
    * The row's number of queries.
    * The row's first position.
    * The number of parts of the tile's KV.
    * The tile's index in the row.

    The items of a row follow each other, tile by tile.

    Attributes:
        items: int32 [N, 8].
        places: int32 [3, T]. A token's column is the first item of its row, the number of parts of
            each of the row's tiles (0 if the row is not long), and the row's first query.
        tiles: the tile of the kernel that runs the schedule. Parts begin at multiples of `tiles.n`.
    """

    items: Tensor
    places: Tensor
    tiles: Tiles


@dataclass(frozen=True, slots=True)
class Schedule:
    """The schedule of short rows.

    The words of an item are, in this order:

    * The row, or -1 for an unused item.
    * The first KV position.
    * The end of the KV positions.
    * The row's first query.
    * The row's number of queries.
    * The row's first position.
    * The row's number of items.
    * An unused word.

    The items of a row follow each other.

    Attributes:
        items: int32 [N, 8].
        rows: int32 [2, R], the first item of each row, and its number of items.
        tiles: the tile of the kernel that runs the schedule. Parts begin at multiples of `tiles.n`.
        longest: the most tokens of a short row.
        parts: whether a row may have several items.
        long: the schedule of longer rows, if the KV of their tiles may be cut into parts too.
    """

    items: Tensor
    rows: Tensor
    tiles: Tiles
    longest: int
    parts: bool
    long: LongSchedule | None = None


@triton.jit
def _parts(query_start_ptr, seq_lens_ptr, rows, num_rows, window, longest, WINDOW, BN, DECODES):
    """Returns five values for each of the rows [n]: the first query, the number of queries, the
    first position, the first KV position that queries see, and the number of KV tiles.

    The number of KV tiles is 0 for rows that are not short. With DECODES rows have one token each,
    and the pointers are to the rows' lanes and the lanes' positions."""
    inside = rows < num_rows
    if DECODES:
        lane = tl.load(query_start_ptr + rows, mask=inside, other=-1)
        q_start = rows
        q_len = (lane >= 0).to(tl.int32)
        position = tl.load(seq_lens_ptr + lane, mask=lane >= 0, other=0)
        seq_len = tl.maximum(position, 0) + q_len
    else:
        q_start = tl.load(query_start_ptr + rows, mask=inside, other=0)
        q_len = tl.load(query_start_ptr + rows + 1, mask=inside, other=0) - q_start
        seq_len = tl.load(seq_lens_ptr + rows, mask=inside, other=0)
    first = seq_len - q_len
    start = first * 0
    if WINDOW:
        # Rounded down to a multiple of BN.
        start = tl.maximum(first - window + 1, 0) // BN * BN
    short = inside & (q_len > 0) & (q_len <= longest)
    return q_start, q_len, first, start, tl.where(short, tl.cdiv(seq_len - start, BN), 0)


@triton.jit
def _cut(tiles, span, most):
    """Returns the tiles of a part and the number of parts, for rows of `tiles` KV tiles in even
    parts of about `span` tiles."""
    parts = tl.minimum(tl.cdiv(tiles, span), most)
    per = tl.cdiv(tiles, tl.maximum(parts, 1))
    return per, tl.cdiv(tiles, tl.maximum(per, 1))


@triton.jit
def _item_offsets(own, per, rows, tiles, span, most):
    """Returns the number of items before each of the rows `own`, and the number of items of each of
    the rows [n].

    Items are ordered by the length of their parts, longest first. Rows `own` have `per` tiles in a
    part. The parts of the other rows follow from `tiles`."""
    other_per, parts = _cut(tiles, span, most)
    tie = (other_per[None, :] == per[:, None]) & (rows[None, :] < own[:, None])
    before = (other_per[None, :] > per[:, None]) | tie
    return tl.sum(tl.where(before, parts[None, :], 0), 1), tl.sum(parts, 0)


@triton.jit
def schedule_rows(
    program, query_start_ptr, seq_lens_ptr, items_ptr, rows_ptr, num_rows, num_items, spare,
    longest, window, min_tiles, most,
    BN: tl.constexpr, OWN_ROWS: tl.constexpr, AT_ONCE: tl.constexpr, ONCE: tl.constexpr,
    WINDOW: tl.constexpr, DECODES: tl.constexpr,
):  # fmt: skip
    """Writes the items of OWN_ROWS rows in each program, after all rows with longer parts, and
    after earlier rows with equal parts.

    ONCE says that there are at most AT_ONCE rows. For DECODES see `_parts`."""
    rows = tl.arange(0, AT_ONCE)
    own = program * OWN_ROWS + tl.arange(0, OWN_ROWS)
    q_start, q_len, first, start, own_tiles = _parts(
        query_start_ptr, seq_lens_ptr, own, num_rows, window, longest, WINDOW, BN, DECODES
    )
    _, _, _, _, tiles = _parts(
        query_start_ptr, seq_lens_ptr, rows, num_rows, window, longest, WINDOW, BN, DECODES
    )
    total = tl.sum(tiles, 0)
    if not ONCE:
        for begin in range(AT_ONCE, num_rows, AT_ONCE):
            _, _, _, _, more = _parts(
                query_start_ptr,
                seq_lens_ptr,
                begin + rows,
                num_rows,
                window,
                longest,
                WINDOW,
                BN,
                DECODES,
            )
            total += tl.sum(more, 0)
    span = tl.maximum(tl.cdiv(total, spare), min_tiles)
    per, parts = _cut(own_tiles, span, most)
    place, placed = _item_offsets(own, per, rows, tiles, span, most)
    if not ONCE:
        for begin in range(AT_ONCE, num_rows, AT_ONCE):
            _, _, _, _, more = _parts(
                query_start_ptr,
                seq_lens_ptr,
                begin + rows,
                num_rows,
                window,
                longest,
                WINDOW,
                BN,
                DECODES,
            )
            more_place, more_placed = _item_offsets(own, per, begin + rows, more, span, most)
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
    if program == 0:
        for begin in range(placed, num_items, AT_ONCE):
            at = begin + tl.arange(0, AT_ONCE)
            tl.store(items_ptr + at * 8, -1, mask=at < num_items)


@triton.jit(
    do_not_specialize=["num_rows", "num_items", "spare", "longest", "window", "min_tiles", "most"]
)
def _schedule(
    query_start_ptr, seq_lens_ptr, items_ptr, rows_ptr, num_rows, num_items, spare, longest,
    window, min_tiles, most,
    BN: tl.constexpr, OWN_ROWS: tl.constexpr, AT_ONCE: tl.constexpr, ONCE: tl.constexpr,
    WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Runs `schedule_rows`. Grid: (groups of OWN_ROWS rows)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    schedule_rows(
        tl.program_id(0), query_start_ptr, seq_lens_ptr, items_ptr, rows_ptr, num_rows, num_items,
        spare, longest, window, min_tiles, most, BN, OWN_ROWS, AT_ONCE, ONCE, WINDOW, False,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cuts:
    """The parts into which the KV of short rows is cut.

    Attributes:
        longest: the most tokens of a short row.
        tiles: the tile of the kernel that runs the schedule.
        spare: the most items that cutting adds to one per row. Without any, rows have one part.
        min_tiles: the fewest KV tiles of a part.
        most_parts: the most parts of a row.
        window: positions that a query sees, or None.
    """

    longest: int
    tiles: Tiles
    spare: int
    min_tiles: int
    most_parts: int
    window: int | None

    def numbers(self, rows: int) -> tuple[int, ...]:
        """Returns the numbers of a kernel that runs `schedule_rows`, for `rows` rows."""
        most = self.most_parts if self.spare else 1
        spare, window = max(self.spare, 1), self.window or 0
        return rows + self.spare, spare, self.longest, window, self.min_tiles, most

    def constants(self, rows: int) -> dict[str, Any]:
        """Returns its compile-time constants."""
        at_once = min(_AT_ONCE, max(32, triton.next_power_of_2(rows)))
        return {
            "BN": self.tiles.n,
            "OWN_ROWS": OWN,
            "AT_ONCE": at_once,
            "ONCE": rows <= at_once,
            "WINDOW": self.window is not None,
        }


def empty_schedule(rows: int, cuts: Cuts, device: torch.device) -> Schedule:
    """Returns a schedule whose items are not written yet."""
    items = torch.empty(rows + cuts.spare, 8, dtype=torch.int32, device=device)
    first = torch.empty(2, rows, dtype=torch.int32, device=device)
    return Schedule(items, first, cuts.tiles, cuts.longest, cuts.spare > 0)


def schedule(query_start: Tensor, seq_lens: Tensor, cuts: Cuts, *, pdl: bool) -> Schedule:
    """Schedules rows of 1 to `cuts.longest` tokens.

    Args:
        query_start: int32 [R + 1].
        seq_lens: int32 [R].
    """
    count = seq_lens.shape[0]
    made = empty_schedule(count, cuts, seq_lens.device)
    launch(_schedule, (triton.cdiv(count, OWN),))(
        query_start, seq_lens, made.items, made.rows, count, *cuts.numbers(count),
        **cuts.constants(count), PDL=pdl,
        **metadata_options(pdl, num_warps=1 if count <= 32 else 4),
    )  # fmt: skip
    return made


@triton.jit
def _long_rows(
    query_start_ptr, seq_lens_ptr, rows, num_rows, window, shortest,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Returns five values for each of the rows [n]: the first query, the number of queries, the
    first position, the number of tiles of queries, and the most KV tiles of such a tile.

    The number of tiles is 0 for rows that are not long."""
    inside = rows < num_rows
    q_start = tl.load(query_start_ptr + rows, mask=inside, other=0)
    q_len = tl.load(query_start_ptr + rows + 1, mask=inside, other=0) - q_start
    seq_len = tl.load(seq_lens_ptr + rows, mask=inside, other=0)
    queries = tl.where(q_len >= shortest, tl.cdiv(q_len * GROUP, BM), 0)
    kv = tl.cdiv(seq_len, BN)
    if WINDOW:
        # The range begins with the KV that a tile's first query sees, and ends at its last
        # query's position.
        kv = tl.minimum(kv, tl.cdiv(tl.minimum(window, seq_len) + BM // GROUP + 1, BN) + 1)
    return q_start, q_len, seq_len - q_len, queries, kv


@triton.jit
def _share(kv, total, spare, most):
    """Returns the KV tiles of a part and the number of parts, for tiles of queries that have `kv`
    of the `total` KV tiles.

    Rounding leaves at most `spare` parts in tiles that have several parts."""
    parts = tl.minimum(kv * spare // tl.maximum(total, 1), tl.minimum(tl.cdiv(kv, _FEWEST), most))
    per = tl.cdiv(kv, tl.maximum(parts, 1))
    return per, tl.cdiv(kv, tl.maximum(per, 1))


@triton.jit(
    do_not_specialize=["num_rows", "num_items", "tokens", "spare", "shortest", "window", "most"]
)
def _schedule_long(
    query_start_ptr, seq_lens_ptr, items_ptr, places_ptr, num_rows, num_items, tokens, spare,
    shortest, window, most,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, AT_ONCE: tl.constexpr,
    WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes the items of one row in each program, after all rows with longer parts, and after
    earlier rows with equal parts."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    own = tl.program_id(0)
    q_start, q_len, first, own_tiles, own_kv = _long_rows(
        query_start_ptr, seq_lens_ptr, own, num_rows, window, shortest, GROUP, BM, BN, WINDOW
    )
    total = 0
    for begin in range(0, num_rows, AT_ONCE):
        rows = begin + tl.arange(0, AT_ONCE)
        _, _, _, tiles, kv = _long_rows(
            query_start_ptr, seq_lens_ptr, rows, num_rows, window, shortest, GROUP, BM, BN, WINDOW
        )
        total += tl.sum(tiles * kv, 0)
    own_per, own_parts = _share(own_kv, total, spare, most)
    item, placed = 0, 0
    for begin in range(0, num_rows, AT_ONCE):
        rows = begin + tl.arange(0, AT_ONCE)
        _, _, _, tiles, kv = _long_rows(
            query_start_ptr, seq_lens_ptr, rows, num_rows, window, shortest, GROUP, BM, BN, WINDOW
        )
        per, parts = _share(kv, total, spare, most)
        before = (per > own_per) | ((per == own_per) & (rows < own))
        item += tl.sum(tl.where(before, tiles * parts, 0), 0)
        placed += tl.sum(tiles * parts, 0)
    for begin in range(0, q_len, AT_ONCE):
        token = begin + tl.arange(0, AT_ONCE)
        at = places_ptr + q_start + token
        tl.store(at, item, mask=token < q_len)
        tl.store(at + tokens, tl.where(own_tiles > 0, own_parts, 0), mask=token < q_len)
        tl.store(at + 2 * tokens, q_start, mask=token < q_len)
    for begin in range(0, own_tiles * own_parts, AT_ONCE):
        place = begin + tl.arange(0, AT_ONCE)
        mine = place < own_tiles * own_parts
        at = items_ptr + (item + place) * 8
        tl.store(at, own, mask=mine)
        tl.store(at + 1, place % own_parts, mask=mine)
        tl.store(at + 2, own_per, mask=mine)
        tl.store(at + 3, q_start, mask=mine)
        tl.store(at + 4, q_len, mask=mine)
        tl.store(at + 5, first, mask=mine)
        tl.store(at + 6, own_parts, mask=mine)
        tl.store(at + 7, place // own_parts, mask=mine)
    if own == 0:
        for begin in range(tl.load(query_start_ptr + num_rows), tokens, AT_ONCE):
            at = begin + tl.arange(0, AT_ONCE)
            tl.store(places_ptr + tokens + at, 0, mask=at < tokens)
        for begin in range(placed, num_items, AT_ONCE):
            at = begin + tl.arange(0, AT_ONCE)
            tl.store(items_ptr + at * 8, -1, mask=at < num_items)


def schedule_long(
    query_start: Tensor,
    seq_lens: Tensor,
    *,
    tokens: int,
    group: int,
    kv_heads: int,
    programs: int,
    shortest: int,
    tiles: Tiles,
    most_parts: int,
    window: int | None,
    pdl: bool,
) -> LongSchedule:
    """Schedules the tiles of (token, head) pairs of rows of at least `shortest` tokens.

    The KV of each tile is in at most `most_parts` parts.

    Args:
        query_start: int32 [R + 1].
        seq_lens: int32 [R].
        tokens: T.
        programs: the intended number of programs. More run if there are more tiles.
    """
    num_rows, device = seq_lens.shape[0], seq_lens.device
    spare = max(1, programs // kv_heads)
    num_items = tokens * group // tiles.m + min(num_rows, tokens // shortest) + spare
    items = torch.empty(num_items, 8, dtype=torch.int32, device=device)
    places = torch.empty(3, tokens, dtype=torch.int32, device=device)
    at_once = min(_AT_ONCE, max(32, triton.next_power_of_2(num_rows)))
    launch(_schedule_long, (num_rows,))(
        query_start, seq_lens, items, places, num_rows, num_items, tokens, spare, shortest,
        window or 0, most_parts,
        GROUP=group, BM=tiles.m, BN=tiles.n, AT_ONCE=at_once, WINDOW=window is not None, PDL=pdl,
        **metadata_options(pdl, num_warps=1 if num_rows <= 32 else 4),
    )  # fmt: skip
    return LongSchedule(items, places, tiles)
