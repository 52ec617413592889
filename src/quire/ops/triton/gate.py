"""A stream that waits for the host."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.launch import launch

_TRIES = 20_000_000
"""Looks at the flag, of about a microsecond each over PCIe."""


@triton.jit(do_not_specialize=["value"])
def _wait(flag_ptr, value, tries):
    """Grid (1,). Volatile, as the host writes while this runs."""
    seen = tl.load(flag_ptr, volatile=True)
    tried = 0
    while (seen < value) & (tried < tries):
        seen = tl.load(flag_ptr, volatile=True)
        tried += 1


def wait_for(flag: Tensor, value: int) -> None:
    """What is queued behind runs once `flag`, int64 [1] in pinned memory, is at least `value`; or
    after some twenty seconds, so that a host that has failed does not leave the device busy for
    ever.

    What the host wrote before the flag is seen by copies and kernels queued behind.
    """
    launch(_wait, (1,))(flag, value, _TRIES, num_warps=1)
