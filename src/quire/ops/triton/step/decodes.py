"""The front of a step of decodes: expansion, embeddings and attention's schedule in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.kv import AttentionHeads
from quire.ops.rows import DecodeInputs, Expanded, ExpandedGroup, LogitRows, StepRows
from quire.ops.triton.attention.attention import short_cuts
from quire.ops.triton.attention.schedule import OWN, empty_schedule, schedule_rows
from quire.ops.triton.launch import launch, metadata_options, traits

_BLOCK = 1024


@triton.jit
def _expand_decode(
    row, at, lanes_ptr, logit_start_ptr, flags_ptr, position_ptr, tokens_ptr, table_ptr,
    weight_ptr, ids_ptr, positions_ptr, seq_lens_ptr, slots_ptr, rows_table_ptr, embedded_ptr,
    logit_lanes_ptr, logit_tokens_ptr, lengths_ptr, ahead_ptr, max_blocks, entries, width,
    tokens_stride, table_stride, weight_stride, leader, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Writes the token of a row. Places `at` are columns of its block table and embedding."""
    lane = tl.load(lanes_ptr + row).to(tl.int64)
    live = lane >= 0
    first = tl.load(position_ptr + lane, mask=live, other=-1)
    real = first >= 0
    position = tl.maximum(first, 0)
    token = tl.load(tokens_ptr + lane * tokens_stride + position, mask=real, other=-1)
    table = table_ptr + lane * table_stride
    used = (at < max_blocks) & (at * BLOCK_TOKENS <= tl.where(live, position, -1))
    entry = tl.load(table + at, mask=used, other=0)
    tl.store(rows_table_ptr + row.to(tl.int64) * max_blocks + at, entry, mask=used)
    # An id outside of the table, such as -1 for padding, reads nothing and gives zeros.
    own = at < tl.where((token >= 0) & (token < entries), width, 0)
    values = tl.load(weight_ptr + token.to(tl.int64) * weight_stride + at, mask=own, other=0.0)
    tl.store(embedded_ptr + row.to(tl.int64) * width + at, values, mask=at < width)
    block = tl.load(table + position // BLOCK_TOKENS, mask=real, other=0).to(tl.int64)
    slot = tl.where(real, block * BLOCK_TOKENS + position % BLOCK_TOKENS, -1)
    tl.store(slots_ptr + row, slot, mask=leader)
    tl.store(ids_ptr + row, token, mask=leader)
    tl.store(positions_ptr + row, position, mask=leader)
    tl.store(seq_lens_ptr + row, tl.where(live, position + 1, 0), mask=leader)
    flags = tl.load(flags_ptr + row)
    # A HELD row has its logit row without a token.
    resumes = ((flags & 8) != 0) & (first < -1)
    place = tl.load(logit_start_ptr + row)
    asked = leader & live & (tl.load(logit_start_ptr + row + 1) > place)
    has = real | resumes
    tl.store(logit_lanes_ptr + place, tl.where(has, lane, -1).to(tl.int32), mask=asked)
    tl.store(logit_tokens_ptr + place, tl.where(resumes, -1, row), mask=asked)
    tl.store(lengths_ptr + place, tl.where(resumes, -2 - first, position) + 1, mask=asked)
    tl.store(ahead_ptr + place, 0, mask=asked)


@triton.jit(
    do_not_specialize=[
        "num_rows", "num_logits", "num_items", "spare", "longest", "window", "min_tiles", "most"
    ]
)  # fmt: skip
def _expand_decodes(
    lanes_ptr, query_start_ptr, logit_start_ptr, flags_ptr, position_ptr, tokens_ptr, table_ptr,
    weight_ptr, ids_ptr, positions_ptr, seq_lens_ptr, slots_ptr, rows_table_ptr, embedded_ptr,
    logit_lanes_ptr, logit_tokens_ptr, lengths_ptr, ahead_ptr, items_ptr, item_rows_ptr, num_rows,
    num_logits, max_blocks, entries, width, tokens_stride, table_stride, weight_stride, num_items,
    spare, longest, window, min_tiles, most,
    BLOCK_TOKENS: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr, OWN_ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr, ONCE: tl.constexpr, WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (rows + 1 + programs of the schedule, chunks).

    The first programs write a row each, then one writes the logit rows behind the step's, and the
    rest write the schedule."""
    program = tl.program_id(0)
    chunk = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    if program < num_rows:
        _expand_decode(
            program, at, lanes_ptr, logit_start_ptr, flags_ptr, position_ptr, tokens_ptr, table_ptr,
            weight_ptr, ids_ptr, positions_ptr, seq_lens_ptr, slots_ptr, rows_table_ptr,
            embedded_ptr, logit_lanes_ptr, logit_tokens_ptr, lengths_ptr, ahead_ptr, max_blocks,
            entries, width, tokens_stride, table_stride, weight_stride, chunk == 0, BLOCK_TOKENS,
        )  # fmt: skip
    elif program == num_rows:
        place = tl.load(logit_start_ptr + num_rows) + at
        tl.store(logit_lanes_ptr + place, -1, mask=place < num_logits)
    elif chunk == 0:
        schedule_rows(
            program - num_rows - 1, lanes_ptr, position_ptr, items_ptr, item_rows_ptr, num_rows,
            num_items, spare, longest, window, min_tiles, most, BN, OWN_ROWS, AT_ONCE, ONCE,
            WINDOW, True,
        )  # fmt: skip


def expand_decodes(
    rows: StepRows,
    position: Tensor,
    tokens: Tensor,
    table: tuple[Tensor, int],
    logit_rows: LogitRows,
    weight: Tensor,
    *,
    max_seq_len: int,
    attention: AttentionHeads,
    even: bool | None = None,
) -> DecodeInputs:
    """See `ops.expand_decodes`."""
    count, device = len(rows.lanes), rows.device
    own, block_tokens = table
    blocks, width = triton.cdiv(max_seq_len, block_tokens), weight.shape[1]

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    ids, positions, seq_lens = empty(count), empty(count), empty(count)
    slots, rows_table = empty(count, dtype=torch.int64), empty(count, blocks)
    embedded = empty(count, width, dtype=weight.dtype)
    cuts = short_cuts(count, attention, 1, traits(device), even=even)
    schedule = empty_schedule(count, cuts, device)
    pdl, logits = traits(device).pdl, len(logit_rows.lanes)
    grid = (
        count + 1 + triton.cdiv(count, OWN),
        triton.cdiv(max(width, blocks, logits), _BLOCK),
    )
    launch(_expand_decodes, grid)(
        *rows, position, tokens, own, weight, ids, positions, seq_lens, slots, rows_table, embedded,
        *logit_rows, schedule.items, schedule.rows, count, logits, blocks, *weight.shape,
        tokens.stride(0), own.stride(0), weight.stride(0), *cuts.numbers(count),
        BLOCK_TOKENS=block_tokens, BLOCK=_BLOCK, **cuts.constants(count), PDL=pdl,
        **metadata_options(pdl, num_warps=4),
    )  # fmt: skip
    group = ExpandedGroup(slots, rows_table)
    return DecodeInputs(
        Expanded(ids, positions, seq_lens, (group,), (), max_seq_len), embedded, schedule
    )
