"""Memory of one process that others on its host map."""

from __future__ import annotations

import mmap
import os
import secrets
from dataclasses import dataclass

import torch

from quire.parallel import ProcessGroup

CLOCK_BEGIN = 64
"""The place of the ranks' clocks in their memory, behind the token; see `LayerClock`."""
_READ_ONLY = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Memory of one process that others on its host can map.

    descriptor: of the process `pid`. token: its first bytes, by which it is known to be the one
    that was meant: with containers, process ids may name others.
    """

    pid: int
    descriptor: int
    size: int
    token: bytes

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.descriptor}"


def read_shared(pid: int, descriptor: int, size: int, token: bytes) -> mmap.mmap | None:
    """Maps another process's memory to be read; None where it is not on this host, may not be read,
    or is not what was meant: process ids of containers may name others."""
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
    """Maps memory that the first rank of a group makes; all ranks, on one host, call it at once.

    device: of tensors that the group gathers. Returns the memory, zeros but for the token, and on
    the first rank its handle, whose descriptor the caller closes.
    """
    handle = _make(size) if group.rank == 0 else None
    named = (0, 0) if handle is None else (handle.pid, handle.descriptor)
    if group.world > 1:
        told = torch.tensor([named], dtype=torch.int32, device=device)
        named = tuple(group.all_gather(told, 0)[0].tolist())
    descriptor = named[1] if handle is not None else _open(*named)
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
