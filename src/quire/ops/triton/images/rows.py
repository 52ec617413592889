"""A tower's outputs in a step: which token takes which, and at which rotary positions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.reference.images import SpanRows
from quire.ops.rows import StepRows
from quire.ops.triton.launch import launch, options, traits


@triton.jit
def _span_rows(
    lanes_ptr, query_start_ptr, positions_ptr, spans_ptr, source_ptr, rotary_ptr,
    rows, count, spans_stride,
    ROWS: tl.constexpr, IMAGES: tl.constexpr, SPANS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Finds what a token takes from its lane's images. Grid: (tokens)."""
    token = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    start_of = tl.arange(0, ROWS)
    starts = tl.load(query_start_ptr + start_of, mask=start_of <= rows, other=2147483647)
    row = tl.sum((starts <= token).to(tl.int32), 0) - 1
    lane = tl.load(lanes_ptr + tl.minimum(row, rows - 1))
    lane = tl.where(row < rows, lane, -1)
    position = tl.load(positions_ptr + token)
    image = tl.arange(0, SPANS)
    # Padding has no images.
    held = image < tl.where(lane >= 0, IMAGES, 0)
    span = spans_ptr + lane.to(tl.int64) * spans_stride + image * 4
    start = tl.load(span, mask=held, other=0)
    tokens = tl.load(span + 1, mask=held, other=0)
    columns = tl.load(span + 2, mask=held, other=1)
    first = tl.load(span + 3, mask=held, other=-1)
    columns = tl.maximum(columns, 1)
    offset = position - start
    behind = (tokens > 0) & (offset >= tokens)
    within = (tokens > 0) & (offset >= 0) & (offset < tokens)
    shift = tl.where(behind, tl.maximum(tokens // columns, columns) - tokens, 0)
    base = tl.where(lane >= 0, position + tl.sum(shift, 0), 0)
    # A token is in one image at most, so sums pick that image's words.
    found = tl.sum(within.to(tl.int32), 0)
    offset = tl.where(within, offset, 0)
    line = tl.sum(offset // columns, 0)
    column = tl.sum(offset % columns, 0)
    source = tl.sum(tl.where(within & (first >= 0), first + offset + 1, 0), 0) - 1
    origin = base - tl.sum(offset, 0)
    tl.store(source_ptr + token, source)
    tl.store(rotary_ptr + token, origin)
    tl.store(rotary_ptr + count + token, tl.where(found > 0, origin + line, origin))
    tl.store(rotary_ptr + 2 * count + token, tl.where(found > 0, origin + column, origin))


@triton.jit
def _take_rows(
    hidden_ptr, source_ptr, values_ptr, width, hidden_stride, values_stride,
    ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes or adds a block of a token's row of values. Grid: (tokens, blocks)."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    source = tl.load(source_ptr + token).to(tl.int64)
    if source < 0:
        return
    inside = at < width
    kind = hidden_ptr.dtype.element_ty
    # Values are rounded to the dtype of hidden states before a sum.
    found = tl.load(values_ptr + source * values_stride + at, mask=inside, other=0.0).to(kind)
    to_row = hidden_ptr + token * hidden_stride + at
    if ADD:
        own = tl.load(to_row, mask=inside, other=0.0).to(tl.float32)
        found = (own + found.to(tl.float32)).to(kind)
    tl.store(to_row, found, mask=inside)


@triton.jit
def _section_rotary(
    table_ptr, positions_ptr, part_ptr, out_ptr, count, table_stride,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gathers the cosines and sines of a token. Grid: (tokens)."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    inside = pair < PAIRS
    part = tl.load(part_ptr + pair, mask=inside, other=0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    position = tl.load(positions_ptr + part * count + token, mask=inside, other=0).to(tl.int64)
    from_row = table_ptr + position * table_stride + pair
    to_row = out_ptr + token * 2 * PAIRS + pair
    tl.store(to_row, tl.load(from_row, mask=inside, other=0.0), mask=inside)
    tl.store(to_row + PAIRS, tl.load(from_row + PAIRS, mask=inside, other=0.0), mask=inside)


def span_rows(rows: StepRows, positions: Tensor, spans: Tensor) -> SpanRows:
    """Returns each token's row of the outputs and rotary positions. See
    `reference.images.span_rows`."""
    count, images = len(positions), spans.shape[1]
    source = torch.empty(count, dtype=torch.int32, device=positions.device)
    rotary = torch.empty((3, count), dtype=torch.int32, device=positions.device)
    pdl = traits(positions.device).pdl
    launch(_span_rows, (count,))(
        rows.lanes, rows.query_start, positions, spans, source, rotary,
        len(rows.lanes), count, spans.stride(0),
        ROWS=triton.next_power_of_2(len(rows.lanes) + 1), IMAGES=images,
        SPANS=triton.next_power_of_2(images), PDL=pdl, **options(pdl, num_warps=1),
    )  # fmt: skip
    return SpanRows(source, rotary)


def _take(hidden: Tensor, source: Tensor, values: Tensor, *, add: bool) -> Tensor:
    tokens, width = hidden.shape
    block = min(triton.next_power_of_2(width), 1024)
    pdl = traits(hidden.device).pdl
    launch(_take_rows, (tokens, triton.cdiv(width, block)))(
        hidden, source, values, width, hidden.stride(0), values.stride(0),
        ADD=add, BLOCK=block, PDL=pdl, **options(pdl, num_warps=4),
    )  # fmt: skip
    return hidden


def replace_rows(hidden: Tensor, source: Tensor, values: Tensor) -> Tensor:
    """Writes rows of `values` over rows of `hidden`. See `ops.replace_rows`."""
    return _take(hidden, source, values, add=False)


def add_rows(hidden: Tensor, source: Tensor, values: Tensor) -> Tensor:
    """Adds rows of `values` to rows of `hidden`. See `ops.replace_rows`."""
    return _take(hidden, source, values, add=True)


def section_rotary(table: Tensor, positions: Tensor, part: Tensor) -> Tensor:
    """Returns each token's cosines and sines. See `ops.section_rotary`."""
    count, pairs = positions.shape[1], len(part)
    out = torch.empty((count, 2 * pairs), dtype=torch.float32, device=table.device)
    pdl = traits(table.device).pdl
    launch(_section_rotary, (count,))(
        table, positions.contiguous(), part, out, count, table.stride(0),
        PAIRS=pairs, BLOCK=triton.next_power_of_2(pairs), PDL=pdl, **options(pdl, num_warps=1),
    )  # fmt: skip
    return out
