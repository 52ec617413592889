"""From a step's rows to what the model is told of every token, out of the device's batch state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.triton.launch import launch, options, traits

_BLOCK = 1024


@triton.jit
def _expand(
    lanes_ptr, query_start_ptr, position_ptr, tokens_ptr, table_ptr, ids_ptr, positions_ptr,
    seq_lens_ptr, slots_ptr, rows_table_ptr, num_rows, num_tokens, max_blocks,
    tokens_stride, table_stride,
    PAGE: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows + 1, chunks). Each row's chunk of tokens and of table entries; the last row is the
    padding behind the others. FIRST: the launch that also writes what KV groups share."""
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
        return
    lane = tl.load(lanes_ptr + row).to(tl.int64)
    length = tl.load(query_start_ptr + row + 1) - start
    if lane < 0:
        if FIRST:
            tl.store(seq_lens_ptr + row, 0)
        return
    first = tl.load(position_ptr + lane)
    own = at < length
    position = first + at
    table = table_ptr + lane * table_stride
    block = tl.load(table + position // PAGE, mask=own, other=0).to(tl.int64)
    tl.store(slots_ptr + out, block * PAGE + position % PAGE, mask=own)
    used = at < tl.cdiv(first + length, PAGE)
    entry = tl.load(table + at, mask=used, other=0)
    tl.store(rows_table_ptr + row.to(tl.int64) * max_blocks + at, entry, mask=used)
    if FIRST:
        ids = tl.load(tokens_ptr + lane * tokens_stride + position, mask=own, other=0)
        tl.store(ids_ptr + out, ids, mask=own)
        tl.store(positions_ptr + out, position, mask=own)
        if tl.program_id(1) == 0:
            tl.store(seq_lens_ptr + row, first + length)


def expand_batch(
    lanes: Tensor,
    query_start: Tensor,
    position: Tensor,
    tokens: Tensor,
    tables: Sequence[tuple[Tensor, int]],
    *,
    num_tokens: int,
    max_seq_len: int,
    pdl: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """What a forward pass over R rows and `num_tokens` token places needs.

    lanes: int32 [R], -1 for rows of padding. query_start: int32 [R + 1]. position: int32 [lanes],
    the first position each lane computes. tokens: int32 [lanes, max_len]. tables: per KV group the
    block tables int32 [lanes, blocks] and the tokens of a block. max_seq_len: a bound of the rows'
    lengths after the step.

    Returns input ids and positions int32 [T], seq_lens int32 [R], and per group slots int64 [T] and
    the rows' block tables int32 [R, blocks], of which each row's own entries are defined. Places
    behind the last row get id -1, position 0, slot -1; rows of padding get length 0.
    """
    rows, device = lanes.shape[0], lanes.device

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    ids, positions, seq_lens = empty(num_tokens), empty(num_tokens), empty(rows)
    use_pdl = traits(device).pdl if pdl is None else pdl
    groups: list[tuple[Tensor, Tensor]] = []
    for index, (table, page) in enumerate(tables):
        blocks = triton.cdiv(max_seq_len, page)
        slots, own = empty(num_tokens, dtype=torch.int64), empty(rows, blocks)
        chunks = triton.cdiv(max(num_tokens, blocks), _BLOCK)
        launch(_expand, (rows + 1, chunks))(
            lanes, query_start, position, tokens, table, ids, positions, seq_lens, slots, own,
            rows, num_tokens, blocks, tokens.stride(0), table.stride(0),
            PAGE=page, FIRST=index == 0, BLOCK=_BLOCK, PDL=use_pdl,
            **options(use_pdl, num_warps=4),
        )  # fmt: skip
        groups.append((slots, own))
    return ids, positions, seq_lens, groups


@triton.jit
def _finish(
    lanes_ptr, query_start_ptr, samples_ptr, sampled_ptr, position_ptr, tokens_ptr, max_total_ptr,
    min_total_ptr, stops_ptr, results_ptr, counts_ptr, tokens_stride, max_len, stops_stride, width,
    vocab, STOPS: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lane = tl.load(lanes_ptr + row).to(tl.int64)
    if lane < 0:
        return
    length = tl.load(query_start_ptr + row + 1) - tl.load(query_start_ptr + row)
    position = tl.load(position_ptr + lane) + length
    tl.store(position_ptr + lane, position)
    if tl.load(samples_ptr + row) == 0:
        tl.store(results_ptr + row, -1)
        tl.store(results_ptr + tl.num_programs(0) + row, 0)
        return
    token = tl.load(sampled_ptr + row)
    tl.store(results_ptr + row, token)
    at = tl.minimum(position, max_len - 1)
    tl.store(tokens_ptr + lane * tokens_stride + at, token)
    if COUNT:
        count = counts_ptr + lane * vocab + token
        tl.store(count, tl.load(count) + 2)
    total = position + 1
    column = tl.arange(0, STOPS)
    stop = tl.load(stops_ptr + lane * stops_stride + column, mask=column < width, other=-1)
    hit = tl.max((stop == token).to(tl.int32), 0) > 0
    hit = hit & (total > tl.load(min_total_ptr + lane))
    long = total >= tl.load(max_total_ptr + lane)
    reason = tl.where(hit, 1, tl.where(long, 2, 0))
    tl.store(results_ptr + tl.num_programs(0) + row, reason)


def finish_rows(
    lanes: Tensor,
    query_start: Tensor,
    samples: Tensor,
    sampled: Tensor,
    *,
    position: Tensor,
    tokens: Tensor,
    max_total: Tensor,
    min_total: Tensor,
    stops: Tensor,
    counts: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """Moves lanes past what was computed, appends sampled tokens, and says why rows end.

    lanes: int32 [N], -1 for padding. query_start: int32 [N + 1]. samples: int32 [N], 0 where a row
    has no new token. sampled: int32 [N]. position, max_total, min_total: int32 [lanes]; position is
    advanced. tokens: int32 [lanes, max_len], gets the sampled token at the new position. stops:
    int32 [lanes, S], ids that end a lane, padded with -1. counts: int32 [lanes, vocab], where the
    sampled token's entry grows by 2, or None. Returns int32 [2, N]: the tokens, -1 where there is
    none, and a `StopReason` per row; undefined for padding.
    """
    rows, device = lanes.shape[0], lanes.device
    results = torch.empty(2, rows, dtype=torch.int32, device=device)
    use_pdl = traits(device).pdl if pdl is None else pdl
    width = stops.shape[1]
    launch(_finish, (rows,))(
        lanes, query_start, samples, sampled, position, tokens, max_total, min_total, stops,
        results, stops if counts is None else counts, tokens.stride(0), tokens.shape[1],
        stops.stride(0), width, 0 if counts is None else counts.shape[1],
        STOPS=triton.next_power_of_2(width), COUNT=counts is not None, PDL=use_pdl,
        **options(use_pdl, num_warps=1),
    )  # fmt: skip
    return results


@triton.jit
def _scatter(addresses_ptr, values_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    to = tl.load(addresses_ptr + at, mask=inside, other=0).to(tl.pointer_type(tl.int32))
    tl.store(to, tl.load(values_ptr + at, mask=inside, other=0), mask=inside)


def scatter(addresses: Tensor, values: Tensor) -> None:
    """Writes each of values int32 [n] to its address int64 [n], a word of the same device's memory.
    That addresses are valid, and differ, is the caller's word."""
    n = values.shape[0]
    launch(_scatter, (triton.cdiv(n, _BLOCK),))(addresses, values, n, BLOCK=_BLOCK, num_warps=4)
