"""The runner's part: it opens the host's memory and the files as each rank's transfer places."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from quire.arrays import Int32, int32
from quire.config import EngineConfig
from quire.executor import WorkerCall
from quire.features.kv_offload.args import OffloadArgs
from quire.models.decoder import DecoderLayers
from quire.parallel import ProcessGroup
from quire.plan import KVGroup
from quire.runner.hooks import Hook
from quire.runner.kv_cache import KVCache
from quire.runner.memory import GB
from quire.runner.transfer.disk import DiskStore, identity
from quire.runner.transfer.host import HostPool
from quire.runner.transfer.layout import BlockLayout
from quire.runner.transfer.place import Place
from quire.runner.transfer.places import DiskPlace, tiers

FILE_KEYS: WorkerCall[int, Int32] = WorkerCall("kv_offload.file_keys")
"""Returns the keys of a KV group's blocks in files, least recently used first, int32 [n, 4]."""


class OffloadHook(Hook):
    """Opens the places that the settings ask for."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._args = OffloadArgs.of(config.args)
        self._places: dict[str, Place] = {}

    def reserved_bytes(self, groups: Sequence[KVGroup], budget: int) -> int:
        return sum(self._staging_bytes(groups, budget))

    def places(
        self, cache: KVCache, models: Sequence[DecoderLayers], group: ProcessGroup
    ) -> Mapping[str, Place]:
        """Opens the host's memory, of which each rank has an equal share, and the files."""
        tensors = [cache.block_tensors(index) for index in range(len(cache.groups))]
        layouts = [BlockLayout(each) for each in tensors]
        blocks = [len(each[0]) for each in tensors]
        limit = int(self._args.host_cache_gb * GB) // group.world
        slots = HostPool.slots_within(layouts, blocks, limit, group.world)
        if group.world > 1:
            # All ranks must have the same number. The gather also makes sure that no rank
            # allocates its memory while another one still checks how much is free.
            counts = torch.tensor(slots, device=self._config.device)
            slots = tuple(group.all_gather(counts).view(group.world, -1).amin(0).tolist())
        size = sum(tensor.nbytes for each in tensors for tensor in each)
        staging = self._staging_bytes(cache.groups, size)
        shapes = [[(tuple(t.shape[1:]), str(t.dtype)) for t in each] for each in tensors]
        self._places = tiers(tensors, slots, staging, self._files(shapes), group)
        return self._places

    def _files(self, shapes: list[list[tuple[tuple[int, ...], str]]]) -> DiskStore | None:
        """Returns the files of this model's blocks; None: the settings ask for none."""
        config, args = self._config, self._config.args
        if self._args.disk_cache is None:
            return None
        seed = args.seed if args.load_format == "dummy" else None
        source = args.load_format, seed, args.quantization, config.dtype
        name = identity(Path(config.model_path), *source, shapes)
        return DiskStore(Path(self._args.disk_cache), int(self._args.disk_cache_gb * GB), name)

    def _staging_bytes(self, groups: Sequence[KVGroup], budget: int) -> tuple[int, ...]:
        """Returns bytes of each group's staging buffer, where blocks wait for their copy to the
        host.

        A buffer holds the blocks that a step of prompts can move out, but at most a fiftieth of
        the cache or a quarter of a GB, whichever is more. A step moves out few recurrent states.
        """
        blocks = -(-self._config.scheduler.max_num_batched_tokens // self._config.block_size)
        most = max(budget // 50, GB // 4)
        sizes = [(2 if group.kind == "state" else blocks) * group.block_bytes for group in groups]
        return tuple(
            max(group.block_bytes, min(size, most))
            for group, size in zip(groups, sizes, strict=True)
        )

    def calls(self) -> Mapping[WorkerCall[Any, Any], Callable[[Any], Any]]:
        return {FILE_KEYS: self._file_keys}

    def _file_keys(self, group: int) -> Int32:
        files = self._places.get("disk")
        return files.keys(group) if isinstance(files, DiskPlace) else int32([]).reshape(0, 4)
