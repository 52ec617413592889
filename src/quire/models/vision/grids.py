"""The order of an image's patches, and the segments within which they attend to each other."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.models.vision.spec import VisionSpec

Ints = npt.NDArray[np.int32]


class PatchGrid(Protocol):
    """The rows `h` and columns `w` of an image's patches."""

    @property
    def h(self) -> int: ...
    @property
    def w(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Segments:
    """Runs of patches. A patch attends to all patches of its run.

    Attributes:
        starts: int32 [segments + 1], the first patch of each run, and the end of the last.
        longest: most patches of a run.
    """

    starts: Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class TowerInputs:
    """All that a tower needs beside the patches of a batch of images.

    Attributes:
        places: int32 [4, patches]. Each patch's row and column, and the rows and columns of its
            image.
        images: a segment for each image.
        windows: a segment for each window, or None for a tower without windows.
        order: int32 [outputs]. For each square of patches in the order of windows, its place in the
            order of images. None: the orders are equal.
    """

    places: Tensor
    images: Segments
    windows: Segments | None = None
    order: Tensor | None = None


def tower_inputs(spec: VisionSpec, grids: Sequence[PatchGrid], device: torch.device) -> TowerInputs:
    """Returns the inputs of a tower for a batch of images."""
    shapes = [(grid.h, grid.w) for grid in grids]
    places = np.concatenate([patch_places(*shape, spec.merge) for shape in shapes], axis=1)
    counts = [h * w for h, w in shapes]
    images = _segments(counts, device)
    if not spec.window:
        return TowerInputs(on_device(places, device), images)
    side = spec.window // (spec.patch * spec.merge)
    orders, lengths, done = [], [], 0
    for h, w in shapes:
        order, own = window_order(h // spec.merge, w // spec.merge, side)
        orders.append(order + done)
        lengths += (own * spec.merge**2).tolist()
        done += len(order)
    order = np.concatenate(orders)
    places = places.reshape(4, done, -1)[:, order].reshape(4, -1)
    windows = _segments(lengths, device)
    return TowerInputs(on_device(places, device), images, windows, on_device(order, device))


@functools.lru_cache(maxsize=64)
def patch_places(h: int, w: int, merge: int) -> Ints:
    """Returns the places of an image's patches in the order of `cut_patches`, int32 [4, h * w]."""
    row, column = np.divmod(np.arange(h * w, dtype=np.int32), w)
    whole = np.broadcast_to(np.array([[h], [w]], np.int32), (2, h * w))
    places = np.concatenate([np.stack([row, column]), whole])
    squares = places.reshape(4, h // merge, merge, w // merge, merge)
    return np.ascontiguousarray(squares.transpose(0, 1, 3, 2, 4).reshape(4, -1))


@functools.lru_cache(maxsize=64)
def window_order(rows: int, columns: int, side: int) -> tuple[Ints, Ints]:
    """Returns the squares of an image window by window, and the number of squares of each window.

    Args:
        rows: rows of squares.
        columns: columns of squares.
        side: side of a window in squares. Windows at the right and at the bottom may be smaller.
    """
    row, column = np.divmod(np.arange(rows * columns, dtype=np.int32), columns)
    window = row // side * -(-columns // side) + column // side
    order = np.argsort(window, kind="stable").astype(np.int32)
    return order, np.bincount(window).astype(np.int32)


def _segments(lengths: Sequence[int], device: torch.device) -> Segments:
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    return Segments(on_device(starts, device), max(lengths))


def on_device(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Returns a copy of an array on the device. The host does not wait for it."""
    found = torch.from_numpy(np.ascontiguousarray(values))
    # Only copies from pinned memory run beside the host.
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found
