"""Memory of GPUs that processes of one host open: calls of CUDA's driver.

Allocations are shared as a whole. Whoever opens one keeps it allocated, also when its owner ends.
"""

from __future__ import annotations

import ctypes
from typing import Any

from quire.errors import QuireError

HANDLE_BYTES = 64
_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class CudaIpc:
    """The driver's calls, from any thread, for one GPU.

    Raises:
        QuireError: there is no driver, or a call fails.
    """

    def __init__(self, device: int) -> None:
        try:
            self._waits: Any = ctypes.CDLL("libcuda.so.1")
            # Calls that return at once, which would wait longer for the interpreter's lock.
            self._quick: Any = ctypes.PyDLL("libcuda.so.1")
        except OSError as error:
            raise QuireError(f"there is no CUDA driver ({error})") from None
        self._context = ctypes.c_void_p()
        self._check(self._waits.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), device))

    def _enter(self) -> None:
        """Makes the GPU's context, which PyTorch uses as well, that of this thread."""
        self._check(self._waits.cuCtxSetCurrent(self._context))

    def allocation(self, address: int) -> tuple[int, int]:
        """Returns where the allocation of an address begins, and its bytes."""
        self._enter()
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._check(
            self._waits.cuMemGetAddressRange_v2(
                ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
            )
        )
        return base.value, size.value

    def export(self, base: int) -> bytes:
        """Returns the handle of an allocation."""
        self._enter()
        handle = _Handle()
        self._check(self._waits.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(base)))
        return bytes(handle)

    def open(self, handle: bytes, size: int) -> int:
        """Maps another process's allocation, whatever `size` says; returns where it begins. Its GPU
        need not be visible to this process, but reachable from the one that it uses."""
        self._enter()
        address = ctypes.c_uint64()
        self._check(
            self._waits.cuIpcOpenMemHandle_v2(
                ctypes.byref(address), _Handle.from_buffer_copy(handle), _ENABLE_PEER_ACCESS
            )
        )
        return address.value

    def close(self, address: int) -> None:
        """Undoes `open`."""
        self._enter()
        self._check(self._waits.cuIpcCloseMemHandle(ctypes.c_uint64(address)))

    def stop(self) -> None:
        """Does nothing: allocations are shared as long as they live."""

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Copies memory on a stream, by the GPU's engines for copies."""
        self._check(
            self._quick.cuMemcpyAsync(
                ctypes.c_uint64(target),
                ctypes.c_uint64(source),
                ctypes.c_size_t(size),
                ctypes.c_void_p(stream),
            )
        )

    def _check(self, status: int) -> None:
        if status:
            name = ctypes.c_char_p()
            self._waits.cuGetErrorName(status, ctypes.byref(name))
            raise QuireError(f"CUDA: {(name.value or b'').decode() or status}")
