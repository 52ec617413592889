"""Copies of many equal pieces of memory by one launch, wherever a kernel can reach them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.launch import launch

WORD = 8
"""Bytes that a copy moves at once; two of them travel in one instruction."""

_CHUNK = 4096
_PROGRAMS = 32
"""Programs of a copy: enough to keep a host link busy, and few enough to leave the device to the
model. One megabyte is in flight at any time, several times the capacity of a link of 55 GB/s and 2
us."""


# One compilation for all counts and sizes, because compiling during service would hold up a step.
@triton.jit(do_not_specialize=["count", "words", "chunks"])
def _copy(addresses_ptr, count, words, chunks, CHUNK: tl.constexpr):
    """Programs share the pieces' chunks evenly. The first `count` addresses are sources, the next
    ones their destinations, all of them multiples of 16."""
    at = tl.arange(0, CHUNK)
    for item in range(tl.program_id(0), count * chunks, tl.num_programs(0)):
        piece = item // chunks
        source = tl.load(addresses_ptr + piece).to(tl.pointer_type(tl.int64))
        target = tl.load(addresses_ptr + count + piece).to(tl.pointer_type(tl.int64))
        offset = (item % chunks) * CHUNK + at
        inside = offset < words
        data = tl.load(tl.multiple_of(source, 16) + offset, mask=inside, other=0)
        tl.store(tl.multiple_of(target, 16) + offset, data, mask=inside)


def copy_pieces(addresses: Tensor, size: int, programs: int = _PROGRAMS) -> None:
    """Copies n pieces of `size` bytes, a multiple of 16.

    The caller guarantees valid addresses, and that no destination overlaps anything else.

    Args:
        addresses: int64 [2, n], sources and destinations, multiples of 16, in device memory or
            pinned host memory.
    """
    count, words = addresses.shape[1], size // WORD
    chunks = triton.cdiv(words, _CHUNK)
    launch(_copy, (min(count * chunks, programs),))(
        addresses, count, words, chunks, CHUNK=_CHUNK, num_warps=8
    )
