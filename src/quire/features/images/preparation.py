"""Pixels to patches on the device, bit-equal to the bicubic resize of Pillow 13."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.features.images.processor import ImageGrid, ProcessorSettings
from quire.models.vision.grids import on_device
from quire.ops.images import cut_patches, resize_columns, resize_rows

_SUPPORT = 2.0
"""Half the width of the bicubic filter, in pixels of the smaller image."""
_A = -0.5
"""Parameter of the bicubic filter (Keys 1981)."""


def prepare(pixels: Tensor, grid: ImageGrid, settings: ProcessorSettings) -> Tensor:
    """Resizes, normalizes and cuts an image, or a group of frames.

    Args:
        pixels: uint8 [grid.frames * height, width, 3], contiguous, on the device.
        grid: from `ImageProcessor.size`.
        settings: from `ImageProcessor.settings`.

    Returns:
        float32 [grid.patches, 3 * temporal * patch * patch], in the order in which the tower and
        `transformers` have patches: squares of merge x merge patches, row by row.
    """
    values = on_device(settings.values(), pixels.device)
    # A patch repeats the frame of an image. Of several frames, each fills its part of a patch.
    depth = settings.temporal // grid.frames
    parts = [
        cut_patches(
            resize(frame, grid.h * settings.patch, grid.w * settings.patch),
            values,
            patch=settings.patch,
            merge=settings.merge,
            temporal=depth,
        )
        for frame in pixels.chunk(grid.frames)
    ]
    if len(parts) == 1:
        return parts[0]
    return torch.stack([part.view(len(part), 3, -1) for part in parts], dim=2).flatten(1)


def resize(pixels: Tensor, height: int, width: int) -> Tensor:
    """Returns the image in another size, uint8 [height, width, 3], bit-equal to Pillow 13.

    Pillow resizes one side, rounds, and resizes the other. It skips a side that keeps its size.
    """
    rows, columns, _ = pixels.shape
    # Pillow begins with the height if that leaves fewer pixels by far (since version 13).
    rows_first = rows - height > max(0, 2 * (columns - width))
    if rows_first:
        pixels = resize_rows(pixels, *_taps(rows, height, pixels.device))
    if columns != width:
        pixels = resize_columns(pixels, *_taps(columns, width, pixels.device))
    if rows != height and not rows_first:
        pixels = resize_rows(pixels, *_taps(rows, height, pixels.device))
    return pixels


def _taps(size: int, wanted: int, device: torch.device) -> tuple[Tensor, Tensor]:
    first, weights = bicubic_taps(size, wanted)
    return on_device(first, device), on_device(weights, device)


@functools.lru_cache(maxsize=256)
def bicubic_taps(size: int, wanted: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Returns the pixels that each pixel of a resized side is the weighted sum of.

    The arithmetic is that of Pillow (Resample.c): float64 in the same order, then weights of 22
    bits behind the point.

    Args:
        size: pixels of the side.
        wanted: pixels after the resize.

    Returns:
        int32 [wanted], the first pixel of each sum. int32 [wanted, taps], the weights of the pixels
        from there on. Weights past the last pixel are 0.
    """
    scale = size / wanted
    stretch = max(scale, 1.0)
    support = _SUPPORT * stretch
    count = math.ceil(support) * 2 + 1
    center = (np.arange(wanted) + 0.5) * scale
    first = np.maximum((center - support + 0.5).astype(np.int64), 0)
    end = np.minimum((center + support + 0.5).astype(np.int64), size)
    tap = np.arange(count)
    inside = tap < (end - first)[:, None]
    weights = _bicubic((tap + first[:, None] - center[:, None] + 0.5) * (1.0 / stretch))
    weights = np.where(inside, weights, 0.0)
    # An accumulation adds in order, unlike `sum`.
    weights /= np.add.accumulate(weights, axis=1)[:, -1:]
    fixed = np.trunc(weights * (1 << 22) + np.where(weights < 0, -0.5, 0.5)).astype(np.int32)
    used = int((end - first).max())
    return first.astype(np.int32), np.ascontiguousarray(fixed[:, :used])


def _bicubic(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    x = np.abs(x)
    near = ((_A + 2.0) * x - (_A + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * _A
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))
