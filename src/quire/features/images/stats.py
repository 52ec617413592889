"""The statistics of images."""

from __future__ import annotations

import msgspec


class ImageStats(msgspec.Struct):
    """Counts since the start.

    Attributes:
        images: images of accepted requests.
        encoded: images that the tower has encoded.
        encoded_tokens: their positions.
        encoder_seconds: the device's time for it.
        cache_hits: images whose embeddings were cached when a step needed them.
        cached_tokens: positions of the cached embeddings.
        cached_bytes: bytes of the cached embeddings.
        pixel_bytes: bytes of pixels in shared memory.
    """

    images: int = 0
    encoded: int = 0
    encoded_tokens: int = 0
    encoder_seconds: float = 0.0
    cache_hits: int = 0
    cached_tokens: int = 0
    cached_bytes: int = 0
    pixel_bytes: int = 0
