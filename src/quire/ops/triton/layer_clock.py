"""A count in the host's memory that a stream writes."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.launch import launch


@triton.jit(do_not_specialize=["layers"])
def _set(before_ptr, clock_ptr, layers):
    """Grid (1,)."""
    tl.store(clock_ptr, tl.load(before_ptr) + layers)


def set_clock(before: Tensor, layers: int, clock: Tensor) -> None:
    """See `reference.layer_clock`. It starts when all before it is complete (no PDL), so that who
    sees the count can read what kernels before have written, from any device."""
    launch(_set, (1,))(before, clock, layers, num_warps=1)
