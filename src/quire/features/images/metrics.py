"""Metrics of images."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from quire.features.images.stats import ImageStats
from quire.features.metric_families import counters, gauge

_COUNTERS = {
    "images": ("images", "Images of accepted requests."),
    "encoded": ("images_encoded", "Images that the vision tower has encoded."),
    "encoded_tokens": ("image_tokens_encoded", "Prompt positions of these images."),
    "encoder_seconds": ("image_encoder_seconds", "Seconds that this took on the device."),
    "cache_hits": (
        "image_cache_hits",
        "Images whose embeddings were cached when a step needed them.",
    ),
}

LIVE_ROWS = {
    "images": "Images",
    "encoded": "Images encoded",
    "cache_hits": "Images found in the cache of embeddings",
}
"""The names of the statistics in the live view."""


def collect(found: ImageStats) -> Iterator[Metric]:
    """Yields the metric families of the statistics."""
    yield from counters(found, _COUNTERS)
    yield gauge("image_cache_bytes", "Bytes of cached embeddings of images.", found.cached_bytes)
    yield gauge("image_pixel_bytes", "Bytes of pixels in shared memory.", found.pixel_bytes)
