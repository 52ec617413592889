"""The work between the passes of a draft model. One program serves all lanes, which are few."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.reference.drafts import PassRows
from quire.ops.rows import Drafts
from quire.ops.triton.launch import launch


@triton.jit
def _begin_drafts(
    rows_ptr, counts_ptr, query_start_ptr, position_ptr, own_ptr, used_ptr, ids_ptr, start_ptr,
    pass_lanes_ptr, lengths_ptr, places_ptr, depth_ptr, num_lanes, width, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < num_lanes
    lanes = tl.load(rows_ptr + at, mask=inside, other=-1)
    tl.store(pass_lanes_ptr + at, lanes, mask=inside)
    real_row = lanes >= 0
    lane = tl.maximum(lanes, 0).to(tl.int64)
    text = tl.load(position_ptr + lane, mask=real_row, other=0)
    text = tl.where(text < -1, -2 - text, text)
    first = tl.minimum(tl.load(own_ptr + lane, mask=real_row, other=0), text)
    start = tl.load(query_start_ptr + at, mask=inside, other=0)
    end = tl.load(query_start_ptr + at + 1, mask=inside, other=0)
    real = tl.minimum(end - start, text + 1 - first)
    wants = real_row & (tl.load(counts_ptr + at, mask=inside, other=0) > 0)
    tl.store(own_ptr + lane, first, mask=real_row)
    tl.store(used_ptr + lane, real - 1, mask=real_row)
    tl.store(places_ptr + at, tl.where(real_row, start + real - 1, 0), mask=inside)
    tl.store(lengths_ptr + at, first + real, mask=real_row)
    tl.store(start_ptr + lane, text + 1, mask=wants)
    for column in range(0, width):
        tl.store(ids_ptr + lane * width + column, -1, mask=wants)
    tl.store(depth_ptr, 1)


def begin_drafts(
    rows: Tensor,
    counts: Tensor,
    query_start: Tensor,
    position: Tensor,
    own: Tensor,
    used: Tensor,
    claims: Drafts,
    passes: PassRows,
) -> None:
    """See `ops.reference.drafts`."""
    lanes = len(rows)
    launch(_begin_drafts, (1,))(
        rows, counts, query_start, position, own, used, claims.ids, claims.start, passes.lanes,
        passes.lengths, passes.places, passes.depth, lanes, claims.ids.shape[1],
        BLOCK=triton.next_power_of_2(lanes), num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _keep_drafts(
    drawn_ptr, counts_ptr, position_ptr, own_ptr, tokens_ptr, ids_ptr, pass_lanes_ptr,
    query_start_ptr, lengths_ptr, depth_ptr, num_rows, num_lanes, width, tokens_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < num_lanes
    depth = tl.load(depth_ptr)
    lanes = tl.load(pass_lanes_ptr + at, mask=inside, other=-1)
    row = (at < num_rows) & (lanes >= 0)
    lane = tl.maximum(lanes, 0).to(tl.int64)
    length = tl.load(lengths_ptr + at, mask=inside, other=0)
    counts = tl.load(counts_ptr + at, mask=inside, other=0)
    text = tl.load(position_ptr + lane, mask=row, other=-1)
    text = tl.where(text < -1, -2 - text, text)
    tl.store(own_ptr + lane, length, mask=row & (text >= 0))
    place = length - text - 1
    drawn = tl.load(drawn_ptr + at, mask=row, other=-1)
    kept = row & (text >= 0) & (counts > 0) & (place >= 0) & (drawn >= 0)
    tl.store(tokens_ptr + lane * tokens_stride + length, drawn, mask=kept)
    tl.store(ids_ptr + lane * width + place, drawn, mask=kept)
    goes_on = row & (counts > depth)
    count = tl.sum(goes_on.to(tl.int32), 0)
    # Rows come in descending order of their drafts, so the rows that continue are the first.
    tl.debug_barrier()
    tl.store(pass_lanes_ptr + at, tl.where(goes_on, lanes, -1), mask=inside)
    tl.store(lengths_ptr + at, length + 1, mask=inside)
    tl.store(query_start_ptr + at, tl.minimum(at, count), mask=inside)
    tl.store(query_start_ptr + num_lanes, count)
    tl.store(depth_ptr, depth + 1)


def keep_drafts(
    drawn: Tensor,
    counts: Tensor,
    position: Tensor,
    own: Tensor,
    tokens: Tensor,
    claims: Drafts,
    passes: PassRows,
) -> None:
    """See `ops.reference.drafts`."""
    lanes = len(passes.lanes)
    launch(_keep_drafts, (1,))(
        drawn, counts, position, own, tokens, claims.ids, passes.lanes, passes.query_start,
        passes.lengths, passes.depth, len(drawn), lanes, claims.ids.shape[1], tokens.stride(0),
        BLOCK=triton.next_power_of_2(lanes), num_warps=4,
    )  # fmt: skip
