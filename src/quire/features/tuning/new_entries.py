"""Measures the plans that a card's table lacks, and stores each entry as soon as it is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from quire.ops.triton.products.measure import Measured, preferred
from quire.ops.triton.products.plan import GemmPlan, Shape
from quire.ops.triton.products.table import PLANS, bucket, key_of
from quire.ops.triton.products.tune import Tuner, Turn, at_once, tune

_LEAST_POOL = 320 << 20
"""Fewest bytes of weights that a timing reads: more than the caches of a card hold."""
_SPARE = 256 << 20
"""Bytes of the device that are left for other processes and for kernels' code."""

Report = Callable[[Shape, list[Measured[GemmPlan]]], None]


def missing_shapes(shapes: Iterable[Shape], card: str) -> list[Shape]:
    """Returns the 16-bit shapes without an entry in the card's tables. Their rows are rounded up to
    buckets, and each shape occurs once."""
    known = PLANS.entries(card)
    found = {}
    for shape in shapes:
        rows = bucket(shape.m)
        if rows is not None and shape.dtype.itemsize == 2 and key_of(shape) not in known:
            found[key_of(shape)] = shape._replace(m=rows)
    return list(found.values())


def pool_for(shapes: Sequence[Shape], room: int) -> tuple[list[Shape], int]:
    """Returns the shapes that can be measured in `room` bytes of the device, and the bytes of
    weights that they need."""
    # Weights with scales have a pool of their own.
    pools = 2 if any(shape.format is not None for shape in shapes) else 1

    def fits(shape: Shape) -> bool:
        return pools * max(_LEAST_POOL, shape.weight_bytes) + _scratch(shape) <= room - _SPARE

    fitting = [shape for shape in shapes if fits(shape)]
    return fitting, max([_LEAST_POOL, *(shape.weight_bytes for shape in fitting)])


def _scratch(shape: Shape) -> int:
    """Returns the bytes that a shape needs for its results, their comparison, and a dequantized
    weight."""
    outputs = shape.n * (2 if shape.gated else 1)
    whole = 2 * outputs * shape.k if shape.format is not None else 0
    return 24 * shape.m * outputs + whole + (256 << 20)


def make_entries(
    shapes: Sequence[Shape], card: str, device: torch.device, *, room: int, workers: int,
    report: Report, turn: Turn = at_once,
) -> tuple[int, int]:  # fmt: skip
    """Measures shapes of one dtype, and stores their plans.

    Args:
        room: bytes of the device that it may use.
        report: called with each shape's measurements. The first one is that of the rules of thumb.

    Returns:
        How many plans were stored, and how many shapes had no room.

    Raises:
        OSError: the cache directory cannot be written to.
    """
    fitting, pool = pool_for(shapes, room)
    kept = 0
    if fitting:
        tuner = Tuner(device, fitting[0].dtype, pool, turn)
        for shape, found in tune(tuner, fitting, workers):
            best = preferred(found)
            if best is not None:
                PLANS.keep(card, {key_of(shape): best.plan})
                kept += 1
            report(shape, found)
    return kept, len(shapes) - len(fitting)
