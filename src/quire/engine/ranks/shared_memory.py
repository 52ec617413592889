"""Memory that the processes of all ranks map: the hooks' parts, and each rank's last steps."""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Sequence

import numpy as np

from quire.config import EngineConfig
from quire.engine.loop.stats import RankStats
from quire.errors import ConfigError
from quire.runner import Hook, ModelRunner
from quire.runner.model_runner import step_limits

_NEVER = -1


def share(hooks: Sequence[Hook], config: EngineConfig, folder: str, *, create: bool) -> None:
    """Gives hooks their parts of the memory that all ranks map. The first rank makes the file."""
    limits = step_limits(config, hooks)
    sizes = [hook.shared_bytes(limits) for hook in hooks]
    if not sum(sizes):
        return
    # Each part begins a page because some hooks pin their part.
    pages = [-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes]
    if create:
        _check_room(folder, sum(pages))
    path, mode = os.path.join(folder, "hooks"), "w+" if create else "r+"
    memory = np.memmap(path, dtype=np.int8, mode=mode, shape=(sum(pages),))  # type: ignore[call-overload]
    starts = itertools.accumulate(pages, initial=0)
    for hook, size, start in zip(hooks, sizes, starts, strict=False):
        if size:
            hook.share(memory[start : start + size])


def _check_room(folder: str, size: int) -> None:
    """Checks that the shared memory fits. Otherwise the first write to it would end the process.

    Raises:
        ConfigError: the file system has less room.
    """
    found = os.statvfs(folder)
    room = found.f_bavail * found.f_frsize
    if found.f_blocks and size > room:
        raise ConfigError(
            f"ranks share {size / 1e6:.1f} MB of memory, and {os.path.dirname(folder)} has room "
            f"for {room / 1e6:.1f} MB; a container gets more with --shm-size"
        )


class FlightRecorder:
    """Records each rank's last launched and last read step, and its statistics.

    Args:
        folder: folder of the memory that the machine's ranks share; None: only this process sees
            the records.
        world: number of ranks.
        create: makes the files. The first rank does this.
    """

    def __init__(self, folder: str | None, world: int, *, create: bool = False) -> None:
        shape = world, len(RankStats.__struct_fields__)
        if folder is None:
            self._steps, self._counts = np.zeros((world, 2), np.int64), np.zeros(shape)
        else:
            path, mode = os.path.join(folder, "steps"), "w+" if create else "r+"
            self._steps = np.memmap(path, dtype=np.int64, mode=mode, shape=(world, 2))  # type: ignore[call-overload]
            path = os.path.join(folder, "counts")
            self._counts = np.memmap(path, dtype=np.float64, mode=mode, shape=shape)  # type: ignore[call-overload]
        if create:
            self._steps[:] = _NEVER

    def launched(self, rank: int, step_id: int) -> None:
        self._steps[rank, 0] = step_id

    def read(self, rank: int, step_id: int, device_us: float) -> None:
        self._steps[rank, 1] = step_id
        self._counts[rank, :2] += 1, device_us * 1e-6

    def holds(self, rank: int, worker: ModelRunner) -> None:
        """Records the sizes of a started worker's weights and KV cache."""
        parameters = (each for each in worker.model.parameters() if not each.is_meta)
        cache = worker.cache
        blocks = (cache.block_tensors(index) for index in range(len(cache.groups)))
        self._counts[rank, 2:] = (
            sum(parameter.nbytes for parameter in parameters),
            sum(tensor.nbytes for tensors in blocks for tensor in tensors),
        )

    def stats(self) -> list[RankStats]:
        """Returns the counts of all ranks, in order."""
        return [
            RankStats(int(steps), seconds, int(weights), int(kv))
            for steps, seconds, weights, kv in self._counts.tolist()
        ]

    def lines(self) -> list[tuple[int, int]]:
        """Returns each rank's last launched and last read step; -1: no step yet."""
        return [(int(launched), int(read)) for launched, read in self._steps]

    def late_ranks(self) -> list[int]:
        """Returns the ranks that have launched fewer steps than others.

        If all have launched the same step, it returns those that have read fewer steps.
        """
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
