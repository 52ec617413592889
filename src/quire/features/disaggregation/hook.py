"""The runner's part: it opens the memory through which engines exchange blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from quire.executor import WorkerCall
from quire.models.decoder import DecoderLayers
from quire.parallel import ProcessGroup
from quire.runner.hooks import Hook
from quire.runner.kv_cache import KVCache
from quire.runner.transfer.direct_place import open_direct_place
from quire.runner.transfer.ipc_agent import open_ipc_agent
from quire.runner.transfer.nixl_agent import NixlAgent
from quire.runner.transfer.peer import open_peer_place
from quire.runner.transfer.place import Place

POOL: WorkerCall[None, Any] = WorkerCall("disaggregation.pool")
"""Returns the memory between engines, or a description of the memory that peers read."""


class PeerHook(Hook):
    """Opens the transfer place `peer` for the engine's transport."""

    def __init__(self, transport: str = "tcp", device: str = "cpu") -> None:
        self._transport = transport
        self._device = torch.device(device)
        self._pool: Any = None

    def places(
        self, cache: KVCache, models: Sequence[DecoderLayers], group: ProcessGroup
    ) -> Mapping[str, Place]:
        device = self._device
        place: Any
        match self._transport:
            case "nixl":
                place = open_direct_place(cache, models, group, device, NixlAgent)
            case "ipc":
                place = open_direct_place(cache, models, group, device, open_ipc_agent)
            case _:
                place = open_peer_place(cache, models, group, device)
        self._pool = place.pool
        return {"peer": place}

    def calls(self) -> Mapping[WorkerCall[Any, Any], Callable[[Any], Any]]:
        return {POOL: lambda _: self._pool}
