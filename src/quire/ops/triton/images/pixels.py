"""Pixels to patches: a resize in integers as Pillow's, normalization by a table, and cutting."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.launch import launch

_BLOCK = 1024
_POINT = tl.constexpr(22)
"""Bits behind the point of weights."""
_HALF = tl.constexpr(1 << 21)


@triton.jit
def _as_byte(total):
    """Returns a sum of weighted bytes, rounded and cut to 0 to 255."""
    total = (total + _HALF) >> _POINT
    return tl.minimum(tl.maximum(total, 0), 255).to(tl.uint8)


# Sizes of images do not cause compilations here and below, because every image has its own.
@triton.jit(do_not_specialize=["columns", "wanted", "taps"])
def _resize_columns(
    in_ptr, out_ptr, first_ptr, weights_ptr, columns, wanted, taps, BLOCK: tl.constexpr,
):  # fmt: skip
    """Resizes a block of a row. Grid: (rows, blocks)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < 3 * wanted
    column, channel = at // 3, at % 3
    first = tl.load(first_ptr + column, mask=inside, other=0)
    from_row = in_ptr + row * columns * 3 + channel
    total = tl.zeros([BLOCK], tl.int32)
    for tap in range(taps):
        weight = tl.load(weights_ptr + column * taps + tap, mask=inside, other=0)
        # Weights behind the last pixel are 0.
        source = tl.minimum(first + tap, columns - 1)
        total += tl.load(from_row + source * 3, mask=inside, other=0).to(tl.int32) * weight
    tl.store(out_ptr + row * wanted * 3 + at, _as_byte(total), mask=inside)


@triton.jit(do_not_specialize=["rows", "width", "taps"])
def _resize_rows(
    in_ptr, out_ptr, first_ptr, weights_ptr, rows, width, taps, BLOCK: tl.constexpr,
):  # fmt: skip
    """Resizes a block of columns. Grid: (rows of the result, blocks). width: bytes of a row."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    first = tl.load(first_ptr + row)
    total = tl.zeros([BLOCK], tl.int32)
    for tap in range(taps):
        weight = tl.load(weights_ptr + row * taps + tap)
        source = tl.minimum(first + tap, rows - 1).to(tl.int64)
        total += tl.load(in_ptr + source * width + at, mask=inside, other=0).to(tl.int32) * weight
    tl.store(out_ptr + row.to(tl.int64) * width + at, _as_byte(total), mask=inside)


@triton.jit(do_not_specialize=["columns"])
def _cut_patches(
    in_ptr, out_ptr, values_ptr, columns,
    PATCH: tl.constexpr, MERGE: tl.constexpr, TEMPORAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes a block of a patch. Grid: (patches, blocks). columns: pixels of a row."""
    index = tl.program_id(0)
    size: tl.constexpr = 3 * TEMPORAL * PATCH * PATCH
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    across = columns // (PATCH * MERGE)
    square, place = index // (MERGE * MERGE), index % (MERGE * MERGE)
    row = (square // across * MERGE + place // MERGE) * PATCH + at // PATCH % PATCH
    column = (square % across * MERGE + place % MERGE) * PATCH + at % PATCH
    channel = at // (TEMPORAL * PATCH * PATCH)
    pixel = (row.to(tl.int64) * columns + column) * 3 + channel
    byte = tl.load(in_ptr + pixel, mask=inside, other=0).to(tl.int32)
    value = tl.load(values_ptr + channel * 256 + byte, mask=inside, other=0.0)
    tl.store(out_ptr + index.to(tl.int64) * size + at, value, mask=inside)


def resize_columns(pixels: Tensor, first: Tensor, weights: Tensor) -> Tensor:
    """Returns an image with other columns. See `reference.images.resize_columns`."""
    pixels = pixels.contiguous()
    rows, columns, _ = pixels.shape
    wanted, taps = weights.shape
    out = torch.empty((rows, wanted, 3), dtype=torch.uint8, device=pixels.device)
    launch(_resize_columns, (rows, triton.cdiv(3 * wanted, _BLOCK)))(
        pixels, out, first, weights, columns, wanted, taps, BLOCK=_BLOCK, num_warps=4
    )
    return out


def resize_rows(pixels: Tensor, first: Tensor, weights: Tensor) -> Tensor:
    """Returns an image with other rows. See `reference.images.resize_columns`."""
    pixels = pixels.contiguous()
    rows, columns, _ = pixels.shape
    wanted, taps = weights.shape
    out = torch.empty((wanted, columns, 3), dtype=torch.uint8, device=pixels.device)
    launch(_resize_rows, (wanted, triton.cdiv(3 * columns, _BLOCK)))(
        pixels, out, first, weights, rows, 3 * columns, taps, BLOCK=_BLOCK, num_warps=4
    )
    return out


def cut_patches(pixels: Tensor, values: Tensor, *, patch: int, merge: int, temporal: int) -> Tensor:
    """Returns the patches of an image. See `reference.images.cut_patches`."""
    pixels = pixels.contiguous()
    rows, columns, _ = pixels.shape
    count, size = rows * columns // patch**2, 3 * temporal * patch**2
    out = torch.empty((count, size), dtype=torch.float32, device=pixels.device)
    launch(_cut_patches, (count, triton.cdiv(size, _BLOCK)))(
        pixels, out, values, columns,
        PATCH=patch, MERGE=merge, TEMPORAL=temporal, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return out
