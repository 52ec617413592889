"""Descriptions of a process's memory, by which other processes of the host can read it."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Allocation(msgspec.Struct, frozen=True):
    """Memory of another process: its base address there, its bytes, and a handle to open it."""

    begin: int
    size: int
    handle: bytes


class ProcessMemory(msgspec.Struct, frozen=True):
    """Allocations of a process.

    Attributes:
        pid: the process's id.
        started: the process's `start_time`. Together with `pid` it identifies the process.
    """

    pid: int
    started: str
    allocations: list[Allocation]


def start_time(pid: int) -> str:
    """Returns when a process began, as the kernel prints it; "" if this process cannot see it."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state in "ZX" else rest[18]


def is_alive(memory: ProcessMemory) -> bool:
    """Whether a process is alive and visible to this process."""
    return bool(memory.started) and start_time(memory.pid) == memory.started
