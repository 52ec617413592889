"""A run of a tower over one image, padded to a patch bucket, for CUDA graphs.

Padding attends to nothing, and no patch attends to it. Its states are undefined.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from quire.models.vision.grids import Segments, TowerInputs
from quire.models.vision.tower import TowerRun, VisionTower


def padded_run(tower: VisionTower, count: int, states: TowerRun | None) -> TowerRun:
    """Returns a run of one image with `count` patches, which keeps its memory.

    Args:
        states: a longer run, whose states the run shares, or None.
    """
    spec, device = tower.spec, tower.device
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    squares = count // spec.merge**2
    places = torch.zeros(4, count, **ints)
    places[2:] = count
    images = Segments(torch.tensor([0, count], **ints), count)
    windows = order = None
    if spec.window:
        side = spec.window // (spec.patch * spec.merge)
        # An image of one row of squares has the most windows.
        starts = torch.full((math.ceil(squares / side) + 2,), count, **ints)
        starts[0] = 0
        windows = Segments(starts, (side * spec.merge) ** 2)
        order = torch.arange(squares, **ints)
    inputs = TowerInputs(places, images, windows, order)
    if states is None:
        patches = torch.zeros(count, spec.patch_size, dtype=tower.dtype, device=device)
        return tower.empty_run(patches, inputs)
    return TowerRun(
        states.patches[:count],
        inputs,
        states.hidden[:count],
        states.angles[:count],
        states.outputs[:squares],
    )


def fill(run: TowerRun, patches: Tensor, inputs: TowerInputs) -> None:
    """Writes an image into a run. Places behind its patches are padding."""
    own = run.inputs
    run.patches[: len(patches)].copy_(patches)
    own.places[:, : len(patches)].copy_(inputs.places)
    _fill_segments(own.images, inputs.images)
    if own.windows is not None and inputs.windows is not None:
        _fill_segments(own.windows, inputs.windows)
    if own.order is not None and inputs.order is not None:
        # The squares of padding keep their places. An earlier image may have moved them.
        torch.arange(len(own.order), out=own.order)
        own.order[: len(inputs.order)].copy_(inputs.order)


def _fill_segments(own: Segments, given: Segments) -> None:
    """Writes segments, and makes all others empty."""
    count = len(given.starts)
    own.starts[:count].copy_(given.starts)
    own.starts[count:] = given.starts[-1]
