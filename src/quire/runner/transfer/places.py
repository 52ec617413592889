"""The places for KV blocks of this engine: the host's memory, and files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from torch import Tensor

from quire.arrays import Int32
from quire.parallel import ProcessGroup, SingleGroup
from quire.plan import Transfer
from quire.runner.transfer.copier import Copier, CudaCopier, HostCopier
from quire.runner.transfer.disk import DiskStore
from quire.runner.transfer.host import HostPlace, HostPool
from quire.runner.transfer.layout import BlockLayout
from quire.runner.transfer.place import Place
from quire.runner.transfer.rank_moves import shared_moves
from quire.runner.transfer.threads import succeeded


class DiskPlace:
    """Moves blocks between files and slots of the host's pool."""

    slots: tuple[int, ...] = ()

    def __init__(self, pool: HostPool, store: DiskStore) -> None:
        self._pool = pool
        self._store = store
        self._files: dict[int, list[Future[bool]]] = {}

    def keys(self, group: int) -> Int32:
        """Returns the keys of a group's blocks, least recently used first, int32 [n, 4]."""
        return self._store.keys(group)

    def out(self, transfer: Transfer) -> None:
        self._files[transfer.id] = self._jobs(transfer, self._store.write)

    def into(self, transfer: Transfer) -> None:
        self._files[transfer.id] = self._jobs(transfer, self._store.read)

    def _jobs(
        self, transfer: Transfer, move: Callable[[bytes, int, memoryview], Future[bool]]
    ) -> list[Future[bool]]:
        return [
            move(key.tobytes(), transfer.group, self._pool.view(transfer.group, slot))
            for key, slot in zip(transfer.keys, transfer.slots.tolist(), strict=True)
        ]

    def ended(self) -> tuple[list[int], list[int]]:
        finished: list[int] = []
        failed: list[int] = []
        stuck = bool(self._files) and self._store.stuck
        for id, jobs in list(self._files.items()):
            if stuck or all(job.done() for job in jobs):
                del self._files[id]
                (finished if all(map(succeeded, jobs)) else failed).append(id)
        return finished, failed

    @property
    def busy(self) -> bool:
        return bool(self._files)

    def close(self) -> None:
        self._store.close()
        self._files.clear()


def tiers(
    tensors: Sequence[Sequence[Tensor]],
    slots: Sequence[int],
    staging: Sequence[int] = (),
    disk: DiskStore | None = None,
    group: ProcessGroup | None = None,
) -> dict[str, Place]:
    """Returns the host's memory, and files, as places.

    Args:
        tensors: by KV group, the tensors that hold its blocks, [blocks, ...] each.
        slots: by KV group, number of slots in the host's pool.
        staging: by KV group, bytes of the staging buffer on the device.
        disk: the files, or None.
        group: the ranks that move blocks together; None for one rank.
    """
    layouts = [BlockLayout(group) for group in tensors]
    device = tensors[0][0].device
    pool = HostPool(layouts, slots, pinned=device.type == "cuda")
    copier: Copier = (
        CudaCopier(layouts, pool, staging, device)
        if device.type == "cuda"
        else HostCopier(layouts, pool)
    )
    moves = shared_moves(group or SingleGroup(), str(device))
    places: dict[str, Place] = {"host": HostPlace(pool, copier, moves)}
    if disk is not None:
        places["disk"] = DiskPlace(pool, disk)
    return places
