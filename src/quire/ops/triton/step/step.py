"""The parts of a step around the model. They read and write the device's batch state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.arguments import RmsScale
from quire.ops.rows import Drafts, Expanded, ExpandedGroup, LogitRows, ResultRing, StepRows
from quire.ops.triton.launch import launch, options, traits
from quire.ops.triton.step.sampling import scan_rows
from quire.ops.triton.step.sampling_kernels import best_entry

_BLOCK = 1024


# Here and below, sizes do not cause compilations, because compiling while serving would delay a
# step.
@triton.jit(do_not_specialize=["num_segments"])
def _scatter(memory_ptr, packed_ptr, num_segments, BLOCK: tl.constexpr):
    """Copies a chunk of a segment. Grid: (segments, chunks of the longest segment)."""
    line = packed_ptr + tl.program_id(0) * 3
    start = tl.load(line).to(tl.int64)
    count = tl.load(line + 1)
    values = packed_ptr + num_segments * 3 + tl.load(line + 2)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(memory_ptr + start + at, tl.load(values + at, mask=inside, other=0), mask=inside)


def scatter(memory: Tensor, packed: Tensor, segments: int, longest: int) -> None:
    """See `ops.scatter`."""
    grid = segments, triton.cdiv(longest, _BLOCK)
    launch(_scatter, grid)(memory, packed, segments, BLOCK=_BLOCK, num_warps=4)


@triton.jit
def _place_drafts(
    lanes_ptr, query_start_ptr, flags_ptr, position_ptr, tokens_ptr, ids_ptr, start_ptr, used_ptr,
    tokens_stride, width, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes the drafts of a row. Grid: (rows)."""
    row = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lane = tl.load(lanes_ptr + row).to(tl.int64)
    room = tl.load(query_start_ptr + row + 1) - tl.load(query_start_ptr + row) - 1
    prompt = (tl.load(flags_ptr + row) & 1) != 0
    if (lane < 0) | prompt | (room < 1):
        return
    at = tl.load(position_ptr + lane)
    first = tl.load(start_ptr + lane)
    known = at + 1 - first
    column = tl.arange(0, WIDTH)
    held = column < width
    claimed = tl.load(ids_ptr + lane * width + column, mask=held, other=-1)
    before = held & (column < known)
    text = tl.load(tokens_ptr + lane * tokens_stride + first + column, mask=before, other=0)
    agrees = tl.max((before & (text != claimed)).to(tl.int32), 0) == 0
    behind = held & (column >= known)
    # The first place without a guess after the text ends the drafts.
    gap = tl.min(tl.where(behind & (claimed < 0), column, width), 0)
    used = tl.minimum(gap - known, room)
    used = tl.where((known >= 0) & (known < width) & agrees, tl.maximum(used, 0), 0)
    taken = behind & (column < known + used)
    tl.store(tokens_ptr + lane * tokens_stride + first + column, claimed, mask=taken)
    tl.store(used_ptr + lane, used)


def place_drafts(rows: StepRows, position: Tensor, tokens: Tensor, drafts: Drafts) -> None:
    """See `ops.place_drafts`."""
    pdl = traits(rows.device).pdl
    width = drafts.ids.shape[1]
    launch(_place_drafts, (len(rows.lanes),))(
        rows.lanes, rows.query_start, rows.flags, position, tokens, drafts.ids, drafts.start,
        drafts.used, tokens.stride(0), width, WIDTH=triton.next_power_of_2(width), PDL=pdl,
        **options(pdl, num_warps=1),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_logits"])
def _expand(
    lanes_ptr, query_start_ptr, logit_start_ptr, flags_ptr, position_ptr, tokens_ptr, used_ptr,
    table_ptr, ids_ptr, positions_ptr, seq_lens_ptr, slots_ptr, rows_table_ptr,
    logit_lanes_ptr, logit_tokens_ptr, lengths_ptr, ahead_ptr, num_rows, num_tokens, num_logits,
    max_blocks, tokens_stride, table_stride,
    BLOCK_TOKENS: tl.constexpr, FIRST: tl.constexpr, DRAFTS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Writes each row's chunk of tokens, table entries and logit rows. Grid: (rows + 1, chunks).

    The last row of the grid is the padding after the others. With FIRST it also writes the values
    that KV groups share."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    start = tl.load(query_start_ptr + row)
    out = start + at
    if row == num_rows:
        behind = out < num_tokens
        tl.store(slots_ptr + out, -1, mask=behind)
        if FIRST:
            tl.store(ids_ptr + out, -1, mask=behind)
            tl.store(positions_ptr + out, 0, mask=behind)
            place = tl.load(logit_start_ptr + row) + at
            tl.store(logit_lanes_ptr + place, -1, mask=place < num_logits)
        return
    lane = tl.load(lanes_ptr + row).to(tl.int64)
    length = tl.load(query_start_ptr + row + 1) - start
    if lane < 0:
        if FIRST:
            tl.store(seq_lens_ptr + row, 0)
        return
    first = tl.load(position_ptr + lane)
    flags = tl.load(flags_ptr + row)
    generates = (flags & 1) == 0
    # A HELD row has its logit row without a token.
    resumes = ((flags & 8) != 0) & (first < -1)
    last = -2 - first
    computed = length
    if DRAFTS:
        if generates & (length > 1):
            computed = 1 + tl.load(used_ptr + lane)
    if first < 0:
        computed = 0
        first = 0
    own = at < length
    real = at < computed
    position = first + at
    table = table_ptr + lane * table_stride
    block = tl.load(table + position // BLOCK_TOKENS, mask=real, other=0).to(tl.int64)
    slot = tl.where(real, block * BLOCK_TOKENS + position % BLOCK_TOKENS, -1)
    tl.store(slots_ptr + out, slot, mask=own)
    used = at < tl.cdiv(first + length, BLOCK_TOKENS)
    entry = tl.load(table + at, mask=used & (at < max_blocks), other=0)
    rows_table = rows_table_ptr + row.to(tl.int64) * max_blocks
    tl.store(rows_table + at, entry, mask=used & (at < max_blocks))
    if FIRST:
        ids = tl.load(tokens_ptr + lane * tokens_stride + position, mask=real, other=-1)
        tl.store(ids_ptr + out, ids, mask=own)
        tl.store(positions_ptr + out, tl.where(real, position, 0), mask=own)
        if tl.program_id(1) == 0:
            tl.store(seq_lens_ptr + row, first + length)
        logit_start = tl.load(logit_start_ptr + row)
        count = tl.load(logit_start_ptr + row + 1) - logit_start
        asked = at < count
        token = length - count + at
        has = (token < computed) | resumes
        place = logit_start + at
        tl.store(logit_lanes_ptr + place, tl.where(has, lane, -1).to(tl.int32), mask=asked)
        tl.store(logit_tokens_ptr + place, tl.where(resumes, -1, start + token), mask=asked)
        length = tl.where(resumes, last, first + token) + 1
        tl.store(lengths_ptr + place, length, mask=asked)
        tl.store(ahead_ptr + logit_start + at, tl.where(generates, at, 0), mask=asked)


def expand_rows(
    rows: StepRows,
    position: Tensor,
    tokens: Tensor,
    tables: Sequence[tuple[Tensor, int]],
    logit_rows: LogitRows,
    *,
    num_tokens: int,
    max_seq_len: int,
    drafts: Drafts | None = None,
) -> Expanded:
    """See `ops.expand_rows`."""
    count, device = len(rows.lanes), rows.device

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    ids, positions, seq_lens = empty(num_tokens), empty(num_tokens), empty(count)
    logits = len(logit_rows.lanes)
    pdl = traits(device).pdl
    groups: list[ExpandedGroup] = []
    for index, (table, block_tokens) in enumerate(tables):
        blocks = triton.cdiv(max_seq_len, block_tokens)
        slots, own = empty(num_tokens, dtype=torch.int64), empty(count, blocks)
        chunks = triton.cdiv(max(num_tokens, blocks, logits), _BLOCK)
        launch(_expand, (count + 1, chunks))(
            *rows, position, tokens, position if drafts is None else drafts.used, table, ids,
            positions, seq_lens, slots, own, *logit_rows, count, num_tokens, logits, blocks,
            tokens.stride(0), table.stride(0), BLOCK_TOKENS=block_tokens, FIRST=index == 0,
            DRAFTS=drafts is not None, BLOCK=_BLOCK, PDL=pdl, **options(pdl, num_warps=4),
        )  # fmt: skip
        groups.append(ExpandedGroup(slots, own))
    return Expanded(ids, positions, seq_lens, tuple(groups), (), max_seq_len)


@triton.jit
def _normed(x, weight, width, eps, dtype: tl.constexpr):
    """Returns the RMSNorm of a row in x's dtype. `dtype` is the dtype of the stored weight."""
    wide = x.to(tl.float32)
    wide = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)).to(dtype).to(tl.float32)
    return (wide * weight).to(x.dtype)


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "num_logits", "slots"])
def _collect(
    hidden_ptr, lanes_ptr, query_start_ptr, flags_ptr, logit_lanes_ptr, logit_tokens_ptr,
    position_ptr, last_ptr, kept_ptr, held_ptr, turn_ptr, weight_ptr, num_tokens, num_rows,
    num_logits, width, hidden_stride, slots, eps, BLOCK: tl.constexpr, HELD: tl.constexpr,
    RING: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copies hidden states, and advances PROMPT rows. Grid: (the larger one of tokens and rows,
    chunks of the width). With NORM a chunk is a whole row."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    weight = 1.0
    if NORM:
        weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    place = tl.cast(row, tl.int64)
    if row < num_tokens:
        state = tl.load(hidden_ptr + place * hidden_stride + at, mask=inside, other=0.0)
        if NORM:
            state = _normed(state, weight, width, eps, weight_ptr.dtype.element_ty)
        tl.store(kept_ptr + place * width + at, state, mask=inside)
    if row < num_logits:
        lane_of = tl.load(logit_lanes_ptr + row).to(tl.int64)
        if lane_of >= 0:
            token = tl.load(logit_tokens_ptr + row).to(tl.int64)
            source = hidden_ptr + token * hidden_stride
            if HELD:
                if token < 0:
                    source = held_ptr + lane_of * width
            state = tl.load(source + at, mask=inside, other=0.0)
            if NORM:
                normed = _normed(state, weight, width, eps, weight_ptr.dtype.element_ty)
                # The states of held lanes are normed already.
                state = tl.where(token < 0, state, normed)
            tl.store(last_ptr + place * width + at, state, mask=inside)
    if RING:
        if (row == 0) & (tl.program_id(1) == 0):
            tl.store(turn_ptr, (tl.load(turn_ptr) + 1) % slots)
    if (row < num_rows) & (tl.program_id(1) == 0):
        lane = tl.load(lanes_ptr + row).to(tl.int64)
        if lane >= 0:
            if (tl.load(flags_ptr + row) & 1) != 0:
                length = tl.load(query_start_ptr + row + 1) - tl.load(query_start_ptr + row)
                tl.store(position_ptr + lane, tl.load(position_ptr + lane) + length)


def collect_rows(
    hidden: Tensor,
    rows: StepRows,
    logit_rows: LogitRows,
    position: Tensor,
    last: Tensor,
    kept: Tensor,
    held: Tensor | None = None,
    ring: ResultRing | None = None,
    norm: RmsScale | None = None,
) -> None:
    """See `ops.collect_rows`."""
    tokens, width = hidden.shape
    count = len(rows.lanes)
    pdl = traits(hidden.device).pdl
    block = _BLOCK if norm is None else triton.next_power_of_2(width)
    launch(_collect, (max(tokens, count, 1), triton.cdiv(width, block)))(
        hidden, rows.lanes, rows.query_start, rows.flags, logit_rows.lanes, logit_rows.tokens,
        position, last, kept, last if held is None else held,
        position if ring is None else ring.turn, hidden if norm is None else norm.weight, tokens,
        count, len(logit_rows.lanes), width, hidden.stride(0),
        1 if ring is None else len(ring.lines), 0.0 if norm is None else norm.eps, BLOCK=block,
        HELD=held is not None, RING=ring is not None, NORM=norm is not None, PDL=pdl,
        **options(pdl, num_warps=4 if norm is None else min(max(block // 512, 1), 16)),
    )  # fmt: skip


@triton.jit
def _is_stop(stops_ptr, num_stops, token, STEP: tl.constexpr):
    """Whether a token is one of a lane's stop tokens."""
    hit = 0
    for begin in range(0, num_stops, STEP):
        column = begin + tl.arange(0, STEP)
        stop = tl.load(stops_ptr + column, mask=column < num_stops, other=-1)
        hit = tl.maximum(hit, tl.max((stop == token).to(tl.int32), 0))
    return hit > 0


@triton.jit(do_not_specialize=["num_logits"])
def _finish(
    lanes_ptr, logit_start_ptr, logit_lanes_ptr, lengths_ptr, sampled_ptr, position_ptr, tokens_ptr,
    max_total_ptr, min_total_ptr, num_stops_ptr, stops_ptr, results_ptr, counts_ptr, ring_ptr,
    turn_ptr, best_ptr, num_logits, tokens_stride, max_len, stops_stride, results_stride, vocab,
    slot_stride, num_tiles,
    COLUMNS: tl.constexpr, COUNT: tl.constexpr, RING: tl.constexpr, TILES_PAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Accepts the tokens of a row. Grid: (rows).

    If TILES_PAD is not 0, tokens are picked from `sampling_kernels.scan`'s results, which
    `sampled_ptr` (entries) and `best_ptr` point to."""
    row = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lane = tl.load(lanes_ptr + row).to(tl.int64)
    if lane < 0:
        return
    results = results_ptr + row * results_stride
    column = tl.arange(0, COLUMNS)
    start = tl.load(logit_start_ptr + row)
    end = tl.minimum(tl.load(logit_start_ptr + row + 1), num_logits)
    first = 0
    given = 0
    reason = 0
    going = start < end
    line = tl.full([COLUMNS], -1, tl.int32)
    if going:
        first = tl.load(lengths_ptr + start)
        least = tl.load(min_total_ptr + lane)
        most = tl.load(max_total_ptr + lane)
        num_stops = tl.load(num_stops_ptr + lane)
        for place in range(start, end):
            if going & (tl.load(logit_lanes_ptr + place) >= 0):
                if TILES_PAD:
                    token = best_entry(
                        best_ptr + place * num_tiles, sampled_ptr + place * num_tiles, num_tiles,
                        TILES_PAD,
                    )  # fmt: skip
                else:
                    token = tl.load(sampled_ptr + place)
                if token < 0:
                    reason = 3
                    going = False
                else:
                    at = tokens_ptr + lane * tokens_stride + tl.minimum(first + given, max_len - 1)
                    draft = tl.load(at)
                    tl.store(at, token)
                    line = tl.where(column == given + 2, token, line)
                    if COUNT:
                        count = counts_ptr + lane * vocab + token
                        tl.store(count, tl.load(count) + 2)
                    given += 1
                    total = first + given
                    stop = _is_stop(stops_ptr + lane * stops_stride, num_stops, token, 32)
                    stop = stop & (total > least)
                    reason = tl.where(stop, 1, tl.where(total >= most, 2, 0))
                    going = (draft == token) & (reason == 0)
            else:
                going = False
        if given > 0:
            ends = (reason == 1) | (reason == 2)
            tl.store(position_ptr + lane, tl.where(ends, -1, first - 1 + given))
    if (start < end) & (given == 0) & (reason == 0):
        # The lane is held.
        reason = tl.where(tl.load(position_ptr + lane) < -1, 4, 0)
    line = tl.where(column == 0, given, tl.where(column == 1, reason, line))
    tl.store(results + column, line, mask=column < results_stride)
    if RING:
        slot = ring_ptr + tl.load(turn_ptr).to(tl.int64) * slot_stride
        tl.store(slot + row * results_stride + column, line, mask=column < results_stride)


def finish_rows(
    rows: StepRows,
    logit_rows: LogitRows,
    sampled: Tensor,
    results: Tensor,
    *,
    position: Tensor,
    tokens: Tensor,
    max_total: Tensor,
    min_total: Tensor,
    num_stops: Tensor,
    stops: Tensor,
    counts: Tensor | None = None,
    ring: ResultRing | None = None,
) -> None:
    """See `ops.finish_rows`."""
    _run_finish(
        rows, logit_rows, sampled, None, results, position, tokens, max_total, min_total, num_stops,
        stops, counts, ring,
    )  # fmt: skip


def sample_and_finish(
    logits: Tensor,
    rows: StepRows,
    logit_rows: LogitRows,
    results: Tensor,
    *,
    sampling: Mapping[str, Tensor],
    position: Tensor,
    tokens: Tensor,
    max_total: Tensor,
    min_total: Tensor,
    num_stops: Tensor,
    stops: Tensor,
    ring: ResultRing | None = None,
) -> None:
    """See `ops.sample_and_finish`."""
    best, entry = scan_rows(logits, logit_rows.lanes, logit_rows.lengths, **sampling)
    _run_finish(
        rows, logit_rows, entry, best, results, position, tokens, max_total, min_total, num_stops,
        stops, None, ring,
    )  # fmt: skip


def _run_finish(
    rows: StepRows, logit_rows: LogitRows, sampled: Tensor, best: Tensor | None, results: Tensor,
    position: Tensor, tokens: Tensor, max_total: Tensor, min_total: Tensor, num_stops: Tensor,
    stops: Tensor, counts: Tensor | None, ring: ResultRing | None,
) -> None:  # fmt: skip
    count, tiles = len(rows.lanes), 0 if best is None else best.shape[1]
    pdl = traits(rows.device).pdl
    launch(_finish, (count,))(
        rows.lanes, rows.logit_start, logit_rows.lanes, logit_rows.lengths, sampled, position,
        tokens, max_total, min_total, num_stops, stops, results,
        stops if counts is None else counts, results if ring is None else ring.lines,
        position if ring is None else ring.turn, sampled if best is None else best, len(sampled),
        tokens.stride(0), tokens.shape[1],
        stops.stride(0), results.stride(0), 0 if counts is None else counts.shape[1],
        0 if ring is None else ring.lines.stride(0), tiles,
        COLUMNS=triton.next_power_of_2(results.shape[1]), COUNT=counts is not None,
        RING=ring is not None, TILES_PAD=triton.next_power_of_2(tiles) if tiles else 0, PDL=pdl,
        **options(pdl, num_warps=1),
    )  # fmt: skip


# Shares and lengths are parts of a step's upload, so their alignment varies.
@triton.jit(do_not_specialize_on_alignment=["shares_ptr", "lengths_ptr"])
def _pool(
    hidden_ptr, lanes_ptr, query_start_ptr, shares_ptr, sums_ptr, lengths_ptr, out_ptr, width,
    hidden_stride, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Adds up a row's hidden states. Grid: (rows, chunks of the width)."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lane = tl.load(lanes_ptr + row).to(tl.int64)
    share = tl.load(shares_ptr + row)
    if (lane < 0) | (share == 0):
        return
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    start = tl.load(query_start_ptr + row)
    end = tl.load(query_start_ptr + row + 1)
    vector = tl.zeros([BLOCK], tl.float32)
    if (share & 1) != 0:
        for token in range(start, end):
            state = hidden_ptr + tl.cast(token, tl.int64) * hidden_stride + at
            vector += tl.load(state, mask=inside, other=0.0).to(tl.float32)
        total = sums_ptr + lane * width + at
        if (share & 2) == 0:
            vector += tl.load(total, mask=inside, other=0.0)
        tl.store(total, vector, mask=inside)
        vector = vector / tl.load(lengths_ptr + row).to(tl.float32)
    else:
        last = hidden_ptr + (end - 1).to(tl.int64) * hidden_stride + at
        vector = tl.load(last, mask=inside, other=0.0).to(tl.float32)
    if (share & 4) != 0:
        tl.store(out_ptr + row * width + at, vector, mask=inside)


def pool_rows(
    hidden: Tensor, rows: StepRows, shares: Tensor, sums: Tensor, lengths: Tensor, out: Tensor
) -> None:
    """See `reference.pool`."""
    width = hidden.shape[1]
    pdl = traits(hidden.device).pdl
    launch(_pool, (len(rows.lanes), triton.cdiv(width, 256)))(
        hidden, rows.lanes, rows.query_start, shares, sums, lengths, out, width, hidden.stride(0),
        BLOCK=256, PDL=pdl, **options(pdl, num_warps=2),
    )  # fmt: skip
