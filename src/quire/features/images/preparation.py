"""Pixels to patches on the device."""

from __future__ import annotations

from torch import Tensor

from quire.features.images.processor import ImageGrid, ProcessorSettings


def prepare(pixels: Tensor, grid: ImageGrid, settings: ProcessorSettings) -> Tensor:
    """Resizes, normalizes and cuts an image.

    Args:
        pixels: uint8 [height, width, 3], contiguous, on the device.
        grid: from `ImageProcessor.size`.
        settings: from `ImageProcessor.settings`.

    Returns:
        float32 [grid.patches, 3 * temporal * patch * patch], in the order in which the tower and
        `transformers` have patches: squares of merge x merge patches, row by row.
    """
    raise NotImplementedError
