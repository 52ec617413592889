"""Memory of one process that other processes on its host map."""

from __future__ import annotations

import mmap
import os
import secrets
from dataclasses import dataclass

import torch

from quire.parallel import ProcessGroup

CLOCK_BEGIN = 64
"""Offset of the ranks' clocks in their memory, after the token; see `LayerClock`."""
_READ_ONLY = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Memory of one process that other processes on its host can map.

    Attributes:
        pid: the process's id.
        descriptor: the memory's file descriptor in that process.
        token: the first bytes of the memory. They identify it, because the same process id may
            belong to another process in another container.
    """

    pid: int
    descriptor: int
    size: int
    token: bytes

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.descriptor}"


def read_shared(pid: int, descriptor: int, size: int, token: bytes) -> mmap.mmap | None:
    """Maps another process's memory for reading.

    Returns None if the process is not on this host, its memory may not be read, or the token
    differs.
    """
    try:
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", _READ_ONLY)
    except OSError:
        return None
    try:
        memory = mmap.mmap(opened, size, prot=mmap.PROT_READ)
    except (OSError, ValueError):
        return None
    finally:
        os.close(opened)
    if memory[: len(token)] == token:
        return memory
    memory.close()
    return None


def map_shared(
    size: int, group: ProcessGroup, device: str
) -> tuple[mmap.mmap, SharedMemory | None]:
    """Maps memory that the first rank of a group makes. All ranks, on one host, call it together.

    Returns the memory, which holds the token and zeros. On the first rank it also returns the
    memory's handle, and the caller must close the handle's descriptor.

    Args:
        size: bytes.
        device: device of the tensors that the group gathers.
    """
    handle = _make(size) if group.rank == 0 else None
    place = (0, 0) if handle is None else (handle.pid, handle.descriptor)
    if group.world > 1:
        numbers = torch.tensor([place], dtype=torch.int32, device=device)
        place = tuple(group.all_gather(numbers, 0)[0].tolist())
    descriptor = place[1] if handle is not None else _open(*place)
    memory = mmap.mmap(descriptor, size)
    if handle is None:
        os.close(descriptor)
    else:
        memory[: len(handle.token)] = handle.token
    return memory, handle


def _make(size: int) -> SharedMemory:
    descriptor = os.memfd_create("quire-kv")
    os.ftruncate(descriptor, size)
    return SharedMemory(os.getpid(), descriptor, size, secrets.token_bytes(16))


def _open(pid: int, descriptor: int) -> int:
    return os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
