"""Pinned host memory that holds the content of a sleeping GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.errors import QuireError

_CHUNK = 256 << 20
"""Bytes of one chunk."""
_THREADS = 8
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux."""

Pin = Callable[[Tensor], None]


class PinnedMemory:
    """Chunks of host memory that a GPU reads and writes at the link's speed.

    Pinning takes much longer than a copy, because the system must find and clear all pages. So
    several threads pin chunks at once, and chunks stay pinned until `close`.

    Args:
        pin: pins a chunk, uint8 [bytes]. Threads call it.
        unpin: undoes `pin`.
    """

    def __init__(self, pin: Pin, unpin: Pin) -> None:
        self._pin = pin
        self._unpin = unpin
        self._chunks: list[Tensor] = []

    def chunks(self, size: int) -> Iterator[Tensor]:
        """Yields chunks, uint8 [bytes], of at least `size` bytes in all.

        A chunk comes as soon as it is pinned, while the next ones are still being pinned.

        Raises:
            QuireError: the memory cannot be pinned.
        """
        count = -(-size // _CHUNK)
        there = self._chunks[:count]
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            made = [pool.submit(self._add) for _ in range(count - len(there))]
            yield from there
            for each in made:
                yield each.result()

    def _add(self) -> Tensor:
        pages = mmap.mmap(-1, _CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # The system has no huge pages.
            pages.madvise(mmap.MADV_HUGEPAGE)
        chunk = torch.from_numpy(np.frombuffer(pages, dtype=np.uint8))
        # Without this call `pin` would fill in the pages, one thread at a time. Old kernels lack
        # it. It goes through `ctypes`, which lets other threads run meanwhile.
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(chunk.data_ptr()), ctypes.c_size_t(_CHUNK), _POPULATE_WRITE
        )
        self._pin(chunk)
        self._chunks.append(chunk)
        return chunk

    def close(self) -> None:
        """Gives the memory back. Nobody uses its chunks any more. Idempotent."""
        for chunk in self._chunks:
            self._unpin(chunk)
        self._chunks = []


def pinned_memory(device: torch.device) -> PinnedMemory:
    """Returns memory for copies to and from a GPU."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return PinnedMemory(
        functools.partial(_register, runtime, device),
        lambda chunk: runtime.cudaHostUnregister(chunk.data_ptr()),
    )


def _register(runtime: Any, device: torch.device, chunk: Tensor) -> None:
    torch.cuda.set_device(device)  # A new thread begins on the first GPU.
    status = int(runtime.cudaHostRegister(chunk.data_ptr(), chunk.nbytes, 0))
    if status:
        raise QuireError(
            f"{chunk.nbytes >> 20} MiB of host memory cannot be pinned: CUDA error {status}. A "
            "sleep of level 1 needs as much free host memory as the weights take"
        )
