"""Images: resizing and patches; an encoder's outputs in a step; three-part rotary positions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.rows import StepRows

_POINT = 22
"""Bits behind the point of the weights of a resize, as Pillow has them."""


class SpanRows(NamedTuple):
    """Each token's part of the images of its lane.

    Attributes:
        source: int32 [T], row of the encoder's outputs, -1 for tokens of the vocabulary.
        rotary: int32 [3, T], rotary positions in time, rows and columns.
    """

    source: Tensor
    rotary: Tensor


def span_rows(rows: StepRows, positions: Tensor, spans: Tensor) -> SpanRows:
    """Returns each token's row of the encoder's outputs, and its rotary positions.

    Args:
        rows: the step's rows.
        positions: int32 [T], each token's position in its sequence.
        spans: int32 [lanes, images, 4], each lane's images in order (see `ops.images`). A span of
            0 tokens is unused.
    """
    count = len(positions)
    token = torch.arange(count, device=positions.device, dtype=torch.int32)
    row = torch.searchsorted(rows.query_start, token, right=True).sub_(1)
    lane = rows.lanes[row.clamp(max=len(rows.lanes) - 1)].where(row < len(rows.lanes), -1)
    real = lane >= 0
    own = spans[lane.clamp(min=0).long()]
    start, tokens, columns, first = own.unbind(-1)
    inside = positions.unsqueeze(1) - start
    used = tokens > 0
    lines = torch.div(tokens, columns.clamp(min=1), rounding_mode="floor")
    shift = (torch.maximum(lines, columns) - tokens).where(used & (inside >= tokens), 0)
    base = positions + shift.sum(1, dtype=torch.int32)
    within = used & (inside >= 0) & (inside < tokens) & real.unsqueeze(1)
    found = within.any(1)
    at = within.int().argmax(1, keepdim=True)
    offset, width, row0 = (part.gather(1, at).squeeze(1) for part in (inside, columns, first))
    line = torch.div(offset, width.clamp(min=1), rounding_mode="floor")
    origin = base - offset
    image = torch.stack([origin, origin + line, origin + offset - line * width])
    rotary = torch.where(found, image, base).where(real, 0)
    source = (row0 + offset).where(found & (row0 >= 0), -1)
    return SpanRows(source.int(), rotary.int())


def resize_columns(pixels: Tensor, first: Tensor, weights: Tensor) -> Tensor:
    """Returns an image with other columns, uint8 [rows, columns, 3].

    A column is the sum of weighted columns, rounded and cut to 0 to 255.

    Args:
        pixels: uint8 [rows, any, 3].
        first: int32 [columns], the first column of each sum.
        weights: int32 [columns, taps], the weights with 22 bits behind the point.
    """
    return resize_rows(pixels.transpose(0, 1), first, weights).transpose(0, 1).contiguous()


def resize_rows(pixels: Tensor, first: Tensor, weights: Tensor) -> Tensor:
    """Returns an image with other rows, uint8 [rows, columns, 3]. See `resize_columns`."""
    shape = len(first), *pixels.shape[1:]
    total = torch.full(shape, 1 << (_POINT - 1), dtype=torch.int32, device=pixels.device)
    for tap, weight in enumerate(weights.unbind(1)):
        row = (first + tap).clamp(max=len(pixels) - 1).long()
        total += pixels[row].int() * weight.view(-1, 1, 1)
    return (total >> _POINT).clamp(0, 255).to(torch.uint8)


def cut_patches(pixels: Tensor, values: Tensor, *, patch: int, merge: int, temporal: int) -> Tensor:
    """Returns the patches of an image, float32 [patches, 3 * temporal * patch * patch].

    Squares of merge x merge patches lie one after the other, row by row.

    Args:
        pixels: uint8 [rows, columns, 3]; both are multiples of patch * merge.
        values: float32 [3, 256], the number that a byte of each channel becomes.
        temporal: frames of a patch, which are all equal.
    """
    rows, columns, _ = pixels.shape
    channels = [values[channel][pixels[..., channel].long()] for channel in range(3)]
    down, across = rows // (patch * merge), columns // (patch * merge)
    cut = torch.stack(channels).view(3, down, merge, patch, across, merge, patch)
    cut = cut.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)
    cut = cut.expand(-1, -1, -1, -1, -1, temporal, -1, -1)
    return cut.reshape(down * across * merge * merge, -1)


def rotate_heads(heads: Tensor, angles: Tensor) -> Tensor:
    """Rotates heads in place, and returns them.

    Args:
        heads: [T, any, heads, D], with any strides between tokens. Dimensions i and i + D / 2 of a
            head are a pair.
        angles: float32 [T, D], the cosines of all pairs, then their sines.
    """
    cos, sin = angles[:, None, None].chunk(2, dim=-1)
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return heads.copy_(turned)


def segment_attention(
    qkv: Tensor, starts: Tensor, longest: int, reach: int | None = None
) -> Tensor:
    """Returns the outputs of attention within segments, [T, heads, D].

    Scores are divided by the root of D.

    Args:
        qkv: [T, 3, heads, D], queries, keys and values.
        starts: int32 [segments + 1], the first token of each segment, and the end of the last.
            Outputs of tokens behind it are undefined.
        longest: most tokens of a segment.
        reach: a token attends to tokens at most this far away, on both sides; None for all.
    """
    del longest  # Kernels need it for their launch.
    out = torch.zeros_like(qkv[:, 0])
    for rows in _equal_segments(starts.tolist()):
        length = rows.shape[1]
        q, k, v = qkv[rows].permute(2, 0, 3, 1, 4)
        mask = None
        if reach is not None and reach < length - 1:
            at = torch.arange(length, device=qkv.device)
            mask = (at.unsqueeze(1) - at).abs() <= reach
        own = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out[rows] = own.transpose(1, 2)
    return out


def _equal_segments(ends: list[int]) -> Iterator[Tensor]:
    """Yields the tokens of all segments of one length, int64 [segments, length], for each length.

    Args:
        ends: the first token of each segment, and the end of the last.
    """
    by_length: dict[int, list[int]] = {}
    for low, high in itertools.pairwise(ends):
        by_length.setdefault(high - low, []).append(low)
    for length, lows in by_length.items():
        if length:
            yield torch.tensor(lows).unsqueeze(1) + torch.arange(length)
