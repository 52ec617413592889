"""Defines the words of plans about images, and the facts that the first rank reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from quire.executor import WorkerCall

COLUMN, ENCODE = "image_spans", "image_encode"
"""The column of each lane's images, and the plan entry with the images to encode."""


class Span(NamedTuple):
    """A lane's image in the column; see `quire.ops.images`."""

    start: int
    tokens: int
    columns: int
    row: int


class EncodeEntry(NamedTuple):
    """An image to encode, as words of a plan's entry.

    Attributes:
        row: first row of its embeddings.
        process: process that has the pixels open.
        descriptor: that process's descriptor.
        width: columns of pixels.
        height: rows of pixels.
        frames: frames of a patch that differ; they lie one below the other.
        h: rows of patches.
        w: columns of patches.
        merge: side of the square of patches that becomes one token.
        tokens: number of embeddings.
        first: the first layer of the tower that the step computes.
        end: the layer after the last.
    """

    row: int
    process: int
    descriptor: int
    width: int
    height: int
    frames: int
    h: int
    w: int
    merge: int
    tokens: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class TableFacts:
    """The first rank's table of embeddings.

    Attributes:
        rows: number of its rows.
        row_bytes: bytes of a row.
        seconds: returns the device's time for encoding images since the start.
        layers: number of the tower's layers.
        parts_a_step: most parts of `PART` patches in a step in which streams decode.
    """

    rows: int
    row_bytes: int
    seconds: Callable[[], float]
    layers: int
    parts_a_step: int


TABLE: WorkerCall[None, TableFacts] = WorkerCall("images.table")
"""Returns the facts of the first rank's table."""


PART = 4096
"""Patches times layers of a part of an image, unless one layer has more."""
_FINEST = 64
_PER_DOUBLING = 4
"""Buckets between a number of patches and its double."""


def patch_bucket(patches: int) -> int:
    """Returns the number of patches that an image is padded to."""
    size = _FINEST
    while 2 * size < patches:
        size *= 2
    step = max(_FINEST, size // _PER_DOUBLING)
    return -(-patches // step) * step


def patch_buckets(most: int) -> list[int]:
    """Returns all buckets of up to `most` patches, in order."""
    found = [patch_bucket(1)]
    while (size := patch_bucket(found[-1] + 1)) <= most:
        found.append(size)
    return found


def layer_ranges(layers: int, patches: int) -> list[tuple[int, int]]:
    """Returns the parts of an image: the first layer of each, and the layer after its last.

    Args:
        patches: patches of the image's bucket.
    """
    count = max(1, PART // patches)
    return [(first, min(first + count, layers)) for first in range(0, layers, count)]
