"""Descriptions of the memory of processes of a host, for those that read it."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Allocation(msgspec.Struct, frozen=True):
    """Memory of another process: where it begins there, its bytes, and how to open it."""

    begin: int
    size: int
    handle: bytes


class ProcessMemory(msgspec.Struct, frozen=True):
    """Allocations of a process. pid, started: by which it is known to live."""

    pid: int
    started: str
    allocations: list[Allocation]


def start_of(pid: int) -> str:
    """Returns when a process began, in the kernel's words; "" where it has ended, or is not
    seen."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state in "ZX" else rest[18]


def lives(memory: ProcessMemory) -> bool:
    """Tells whether a process is there, and seen here."""
    return bool(memory.started) and start_of(memory.pid) == memory.started
