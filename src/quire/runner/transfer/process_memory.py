"""Descriptions of a process's memory, for other processes of the host that read it."""

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
        started: when it began (`start_time`). With `pid`, it identifies the process.
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


def lives(memory: ProcessMemory) -> bool:
    """Whether a process lives, and this process can see it."""
    return bool(memory.started) and start_time(memory.pid) == memory.started
