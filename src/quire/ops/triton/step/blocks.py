"""Copies many pieces of memory of equal size by one launch, in device or pinned host memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.launch import launch

WORD = 8
"""Bytes of a word of a copy. One instruction moves two words."""

_CHUNK = 4096
_PROGRAMS = 32
"""Programs of a copy: enough to keep a link to the host busy, and few enough to leave the device to
the model. One megabyte is in flight, several times as much as a link of 55 GB/s and 2 µs needs."""


# Counts and sizes do not cause compilations, because compiling while serving would delay a step.
@triton.jit(do_not_specialize=["count", "words", "chunks"])
def _copy(addresses_ptr, count, words, chunks, CHUNK: tl.constexpr):
    """Copies chunks of pieces, which programs share evenly.

    The first `count` addresses are sources, the next ones their destinations. All are multiples of
    16."""
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
