"""KV caches that other processes of the host can map: the counterpart of CUDA's handles on a CPU.

The pages of each tensor are replaced by the pages of a file in memory, at the same addresses. A
peer opens the file through the descriptor in the owner's process, which the kernel allows to
processes of the same user. Peers can read nothing else of the process in this way.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from quire.errors import QuireError
from quire.runner.transfer.engine_memory import MemoryPieces

_MAP_FIXED = 0x10
_NAME = "quire-cache-"


class SharedFile(msgspec.Struct, frozen=True):
    """A file in memory, by a descriptor of process `pid`.

    A part of `name` cannot be guessed. So a peer can check that it has opened the right file."""

    pid: int
    descriptor: int
    name: str


class SharedPages:
    """Shares the pages of tensors with other processes, and maps their pages. From any thread.

    Args:
        tensors: zeros that were never written, each in pages of its own.

    Raises:
        QuireError: the system has no such files, or a tensor's pages also hold other data.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._files: dict[int, SharedFile] = {}
        """By the address of the tensor."""
        self._sizes: dict[int, int] = {}
        self._opened: dict[int, mmap.mmap] = {}
        for tensor in tensors:
            if tensor.nbytes:
                self._files[tensor.data_ptr()] = self._share(tensor.data_ptr(), tensor.nbytes)
                self._sizes[tensor.data_ptr()] = tensor.nbytes

    def _share(self, address: int, size: int) -> SharedFile:
        if address % mmap.PAGESIZE:
            raise QuireError("a tensor does not begin with a page")
        name = _NAME + secrets.token_hex(16)
        try:
            descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, size)
            # The kernel would end a process that reads a file after it has shrunk.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        except (AttributeError, OSError) as error:
            raise QuireError(f"no file in memory ({error})") from None
        found = self._libc.mmap(
            ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_WRITE,
            mmap.MAP_SHARED | _MAP_FIXED, descriptor, ctypes.c_long(0),
        )  # fmt: skip
        if found != address:
            os.close(descriptor)
            raise QuireError(f"its pages cannot be shared ({os.strerror(ctypes.get_errno())})")
        return SharedFile(os.getpid(), descriptor, name)

    def allocation(self, address: int) -> tuple[int, int]:
        """Returns where the pages of a tensor begin, and their bytes."""
        return address, self._sizes[address]

    def export(self, base: int) -> bytes:
        """Returns the handle of a tensor's pages."""
        return msgspec.msgpack.encode(self._files[base])

    def open(self, handle: bytes, size: int) -> int:
        """Maps another process's pages to be read; returns where they begin.

        Raises:
            QuireError: the pages do not exist, or belong to another file. A process id may stand
                for another process in another container.
        """
        file = msgspec.msgpack.decode(handle, type=SharedFile)
        try:
            descriptor = os.open(
                f"/proc/{file.pid}/fd/{file.descriptor}",
                os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC,
            )
        except OSError as error:
            raise QuireError(f"process {file.pid}: {error.strerror}") from None
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}") != f"/memfd:{file.name} (deleted)":
                raise QuireError(f"process {file.pid}: the descriptor belongs to another file")
            if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise QuireError(f"process {file.pid}: its file may shrink")
            if size <= 0:  # mmap would map the whole file
                raise QuireError(f"process {file.pid}: the file's size is given as {size} bytes")
            memory = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise QuireError(f"process {file.pid}: {error}") from None
        finally:
            os.close(descriptor)
        address: int = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        self._opened[address] = memory
        return address

    def close(self, address: int) -> None:
        """Undoes `open`."""
        self._opened.pop(address).close()

    def stop(self) -> None:
        """Lets other processes open no more files. Idempotent."""
        while self._files:
            os.close(self._files.popitem()[1].descriptor)


def copy_now(pieces: MemoryPieces) -> Callable[[], bool]:
    """Copies pieces before it returns. Other threads run meanwhile."""
    for here, there, size in pieces.each():
        _move(here, there, size)
    return lambda: True


def _memmove() -> Any:
    """Returns C's memmove. A call releases the interpreter's lock; `ctypes.memmove` does not."""
    found = ctypes.CDLL(None).memmove
    found.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
    found.restype = ctypes.c_void_p
    return found


_move = _memmove()
