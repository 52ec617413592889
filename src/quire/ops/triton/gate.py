"""A stream that waits for the host."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.launch import launch

_TRIES = 20_000_000
"""Looks at the flag, of about a microsecond each over PCIe."""


@triton.jit
def _wait(flags_ptr, gate_ptr, tries):
    """Grid (1,). Volatile, as the host writes while this runs."""
    place = tl.load(gate_ptr)
    if place >= 0:
        low = tl.load(gate_ptr + 1).to(tl.int64) & 0xFFFFFFFF
        value = low | (tl.load(gate_ptr + 2).to(tl.int64) << 32)
        seen = tl.load(flags_ptr + place, volatile=True)
        tried = 0
        while (seen < value) & (tried < tries):
            seen = tl.load(flags_ptr + place, volatile=True)
            tried += 1


def wait_for_flag(gate: Tensor, flags: Tensor) -> None:
    """See `reference.mask`. Gives up after some twenty seconds, so that a host that has failed
    does not leave the device busy for ever.

    What the host wrote before the flag is seen by copies and kernels queued behind.
    """
    launch(_wait, (1,))(flags, gate, _TRIES, num_warps=1)
