"""The request fields of images."""

from __future__ import annotations

import msgspec
import numpy as np

from quire.features.call import RequestField


class PlacedImage(msgspec.Struct, frozen=True, array_like=True):
    """An image of a request.

    Attributes:
        start: position of its first token in the prompt.
        tokens: number of its tokens.
        digest: 32 bytes that identify the tower's output.
        grid: frames of a patch, rows and columns of patches, and the side of the square of patches
            that becomes one token.
        size: width and height of its pixels. Frames lie one below the other.
        memory: process and descriptor of the memory that holds the pixels.
    """

    start: int
    tokens: int
    digest: bytes
    grid: tuple[int, int, int, int]
    size: tuple[int, int]
    memory: tuple[int, int]


ITEMS: RequestField[list[PlacedImage]] = RequestField("images.items", list[PlacedImage])
"""The images of a request, in order."""
CACHE_IDS: RequestField[np.ndarray] = RequestField(
    "images.cache_ids", np.ndarray, option="cache_ids"
)
"""The ids by which the KV cache knows the prompt, int32 [prompt]."""
FIELDS = (ITEMS, CACHE_IDS)
