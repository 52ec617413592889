"""Moves whole KV blocks between the device and places outside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.arrays import Int32, int32
from quire.config import EngineConfig
from quire.errors import QuireError
from quire.models.decoder import DecoderLayers
from quire.parallel import ProcessGroup, SingleGroup
from quire.plan import Transfer
from quire.runner.kv_cache import KVCache
from quire.runner.memory import GB, staging_bytes
from quire.runner.transfer.copier import Copier, CudaCopier, HostCopier
from quire.runner.transfer.direct_place import open_direct_place
from quire.runner.transfer.disk import DiskStore, identity
from quire.runner.transfer.host import HostPlace, HostPool
from quire.runner.transfer.ipc_agent import open_ipc_agent
from quire.runner.transfer.layout import BlockLayout
from quire.runner.transfer.nixl_agent import NixlAgent
from quire.runner.transfer.peer import open_peer_place
from quire.runner.transfer.place import Place
from quire.runner.transfer.rank_moves import shared_moves
from quire.runner.transfer.threads import succeeded

_PATIENCE = 2e-3
"""Seconds that a step without rows waits for a transfer to end."""
_NAP = 5e-5


class KVTransfer:
    """Runs the transfers of plans.

    Args:
        places: by name (`Transfer.place`).
    """

    def __init__(self, places: Mapping[str, Place]) -> None:
        self._places = places

    @property
    def slots(self) -> tuple[int, ...]:
        """Number of slots of each group in the host's pool; () without a pool."""
        host = self._places.get("host")
        return host.pool.slots if isinstance(host, HostPlace) else ()

    def start(self, transfers: Sequence[Transfer], direction: str) -> None:
        """Begins the transfers of one direction."""
        for transfer in transfers:
            if transfer.direction != direction:
                continue
            place = self._places.get(transfer.place)
            if place is None:
                raise QuireError(f"there is no place {transfer.place!r} to move blocks to")
            if direction == "out":
                place.out(transfer)
            else:
                place.into(transfer)

    def ended(self, patient: bool) -> tuple[list[int], list[int]]:
        """Returns the ids of transfers that finished, and failed, since the last call.

        Args:
            patient: wait a moment if there are none.
        """
        finished, failed = self._ended()
        deadline = time.monotonic() + _PATIENCE
        while patient and not finished and not failed and self.busy:
            if time.monotonic() > deadline:
                break
            time.sleep(_NAP)
            finished, failed = self._ended()
        return finished, failed

    @property
    def busy(self) -> bool:
        """Whether any transfer has not ended."""
        return any(place.busy for place in self._places.values())

    def _ended(self) -> tuple[list[int], list[int]]:
        finished: list[int] = []
        failed: list[int] = []
        for place in self._places.values():
            good, bad = place.ended()
            finished += good
            failed += bad
        return finished, failed

    def on_control(self, message: dict[str, Any]) -> Any:
        """Answers messages for a place; None: the message is for somebody else.

        disk_keys: returns the keys of a group's blocks in files, least recently used first, int32
            [n, 4].
        staging_pool: returns the memory between peers, or a description of the memory that they
            read.
        """
        match message.get("op"), self._places:
            case "disk_keys", {"disk": DiskPlace() as disk}:
                return disk.keys(message["group"])
            case "disk_keys", _:
                return int32([]).reshape(0, 4)
            case "staging_pool", {"peer": place}:
                return getattr(place, "pool", None)
        return None

    def close(self) -> None:
        """Waits for copies that have begun. Idempotent."""
        for place in reversed(list(self._places.values())):
            place.close()


class DiskPlace:
    """Moves blocks between files and slots of the host's pool."""

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


def open_places(
    config: EngineConfig,
    cache: KVCache,
    models: Sequence[DecoderLayers],
    group: ProcessGroup,
) -> KVTransfer:
    """Opens the places that the settings ask for. All ranks call it at once.

    Args:
        models: the model, then draft models, in the order of their KV groups.

    Raises:
        ConfigError: the host has too little memory, a folder cannot be used, or the model's KV
            cannot be moved.
    """
    places = open_tiers(config, cache, group)
    if config.args.kv_peers is not None:
        places["peer"] = _open_peers(config, cache, models, group)
    return KVTransfer(places)


def _open_peers(
    config: EngineConfig, cache: KVCache, models: Sequence[DecoderLayers], group: ProcessGroup
) -> Place:
    device = torch.device(config.device)
    match (config.args.kv_peers or {}).get("transport"):
        case "nixl":
            return open_direct_place(cache, models, group, device, NixlAgent)
        case "ipc":
            return open_direct_place(cache, models, group, device, open_ipc_agent)
    return open_peer_place(cache, models, group, device)


def open_tiers(config: EngineConfig, cache: KVCache, group: ProcessGroup) -> dict[str, Place]:
    """Opens the host's memory and the files that the settings ask for.

    All ranks call it at once. Each has an equal share of the host's memory.

    Raises:
        ConfigError: the host has too little memory, or the folder cannot be used.
    """
    args = config.args
    if not args.host_cache_gb:
        return {}
    tensors = [cache.block_tensors(index) for index in range(len(cache.groups))]
    layouts = [BlockLayout(each) for each in tensors]
    blocks = [len(each[0]) for each in tensors]
    limit = int(args.host_cache_gb * GB) // group.world
    slots = HostPool.slots_within(layouts, blocks, limit, group.world)
    if group.world > 1:
        # All ranks must have the same number. The gather also makes sure that no rank allocates
        # its memory while another one still checks how much is free.
        counts = torch.tensor(slots, device=config.device)
        slots = tuple(group.all_gather(counts).view(group.world, -1).amin(0).tolist())
    disk = None
    if args.disk_cache is not None:
        shapes = [[(tuple(t.shape[1:]), str(t.dtype)) for t in each] for each in tensors]
        seed = args.seed if args.load_format == "dummy" else None
        source = args.load_format, seed, args.quantization, config.dtype
        name = identity(Path(config.model_path), *source, shapes)
        disk = DiskStore(Path(args.disk_cache), int(args.disk_cache_gb * GB), name)
    staging = staging_bytes(config, cache.groups, sum(t.nbytes for each in tensors for t in each))
    return tiers(tensors, slots, staging, disk, group)
