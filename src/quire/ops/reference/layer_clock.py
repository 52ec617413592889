"""A count in the host's memory of how far a model's layers have come."""

from __future__ import annotations

import torch
from torch import Tensor


def set_clock(before: Tensor, layers: int, clock: Tensor) -> None:
    """Sets a clock behind all that is queued: to what it was before the step, and `layers` more.

    before: int64 [1], on the device. clock: int64 [1], in memory of the host that the device can
    write.
    """
    torch.add(before, layers, out=clock)
