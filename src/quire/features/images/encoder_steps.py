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
        t: time steps.
        h: rows of patches.
        w: columns of patches.
        merge: side of the square of patches that becomes one token.
        tokens: number of embeddings.
    """

    row: int
    process: int
    descriptor: int
    width: int
    height: int
    t: int
    h: int
    w: int
    merge: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TableFacts:
    """The first rank's table of embeddings.

    Attributes:
        rows: number of its rows.
        row_bytes: bytes of a row.
        seconds: returns the device's time for encoding images since the start.
    """

    rows: int
    row_bytes: int
    seconds: Callable[[], float]


TABLE: WorkerCall[None, TableFacts] = WorkerCall("images.table")
"""Returns the facts of the first rank's table."""
