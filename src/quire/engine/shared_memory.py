"""Memory that the processes of all ranks map: the hooks' parts, and how far each rank has come."""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Sequence

import numpy as np

from quire.config import EngineConfig
from quire.runner import Hook
from quire.runner.model_runner import limits_of

_NEVER = -1


def share(hooks: Sequence[Hook], config: EngineConfig, folder: str, *, create: bool) -> None:
    """Gives hooks their parts of the memory that all ranks map; the first rank makes the file."""
    limits = limits_of(config, hooks)
    sizes = [hook.shared_bytes(limits) for hook in hooks]
    if not sum(sizes):
        return
    # Each begins a page, as some pin their part.
    pages = [-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes]
    path, mode = os.path.join(folder, "hooks"), "w+" if create else "r+"
    memory = np.memmap(path, dtype=np.int8, mode=mode, shape=(sum(pages),))  # type: ignore[call-overload]
    starts = itertools.accumulate(pages, initial=0)
    for hook, size, start in zip(hooks, sizes, starts, strict=False):
        if size:
            hook.share(memory[start : start + size])


class FlightRecorder:
    """Holds the last step that each rank has launched, and the last that it has read."""

    def __init__(self, folder: str, world: int, *, create: bool = False) -> None:
        path, mode = os.path.join(folder, "steps"), "w+" if create else "r+"
        self._steps = np.memmap(path, dtype=np.int64, mode=mode, shape=(world, 2))  # type: ignore[call-overload]
        if create:
            self._steps[:] = _NEVER

    def launched(self, rank: int, step_id: int) -> None:
        self._steps[rank, 0] = step_id

    def read(self, rank: int, step_id: int) -> None:
        self._steps[rank, 1] = step_id

    def lines(self) -> list[tuple[int, int]]:
        """Returns each rank's last steps, launched and read; -1: none."""
        return [(int(launched), int(read)) for launched, read in self._steps]

    def behind(self) -> list[int]:
        """Returns the ranks that have launched, or else read, fewer steps than others."""
        steps = [tuple(line) for line in self._steps.tolist()]
        for column in (0, 1):
            most = max(line[column] for line in steps)
            late = [rank for rank, line in enumerate(steps) if line[column] < most]
            if late:
                return late
        return []

    def __str__(self) -> str:
        return "; ".join(
            f"rank {rank} has launched step {launched} and read step {read}"
            for rank, (launched, read) in enumerate(self.lines())
        )
