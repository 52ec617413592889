"""Pixels in memory that other processes open.

The memory has no name in a file system: the kernel frees it when the last process that has it open
closes it or ends. So nothing is left behind after a crash.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable

import numpy as np

from quire.errors import RequestError
from quire.features.images.processor import Pixels


class SharedPixels:
    """The pixels of an image. The memory lives as long as the object, or until `close`.

    Args:
        pixels: uint8 [height, width, 3].
        on_close: called with the number of bytes when the memory is given back, from any thread.

    Attributes:
        size: width and height.
        close: gives the memory back. Idempotent.
    """

    def __init__(self, pixels: Pixels, on_close: Callable[[int], None] | None = None) -> None:
        self.size = pixels.shape[1], pixels.shape[0]
        self._fd = os.memfd_create("quire-pixels", os.MFD_CLOEXEC)
        self.close = weakref.finalize(self, _close, self._fd, pixels.nbytes, on_close)
        view = np.ascontiguousarray(pixels).data.cast("B")
        while view:
            view = view[os.write(self._fd, view) :]

    @property
    def place(self) -> tuple[int, int]:
        """The process and its descriptor, for `open_pixels`."""
        return os.getpid(), self._fd


def _close(fd: int, size: int, on_close: Callable[[int], None] | None) -> None:
    os.close(fd)
    if on_close is not None:
        on_close(size)


def open_pixels(place: tuple[int, int], size: tuple[int, int]) -> int:
    """Opens another process's pixels. Returns a descriptor, which the caller closes.

    Args:
        place: see `SharedPixels.place`.
        size: width and height.

    Raises:
        RequestError: the memory is gone, or holds something else.
    """
    process, descriptor = place
    try:
        fd = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise RequestError(
            f"the pixels of an image cannot be opened: {error.strerror}. API processes and engine "
            "must share a PID namespace"
        ) from None
    if os.fstat(fd).st_size != 3 * size[0] * size[1]:
        os.close(fd)
        raise RequestError("the pixels of an image are gone")
    return fd


def read_pixels(place: tuple[int, int], size: tuple[int, int]) -> Pixels:
    """Returns the pixels of an image without a copy, uint8 [height, width, 3], read-only."""
    fd = open_pixels(place, size)
    try:
        memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    width, height = size
    return np.frombuffer(memory, dtype=np.uint8).reshape(height, width, 3)
