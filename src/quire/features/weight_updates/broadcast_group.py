"""Process groups of a trainer and an engine's ranks, for broadcasts of weights.

A group is apart from the engine's own groups. Its members meet at a store that the trainer opens.
The store's keys are those of the helper that SGLang and its trainers use: a group named `NAME` made
over `PrefixStore(NAME, store)` by `torch.distributed`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quire.errors import RequestError
from quire.features.weight_updates.payloads import JoinGroup, TensorEntry
from quire.models.files import DTYPES

_DEVICES = {"gloo": "cpu", "nccl": "cuda"}


class BroadcastGroup:
    """A member of a group. Making it waits for all other members.

    Args:
        asked: the group.
        rank: this member's rank in it.
        device: device of the tensors that this member sends or receives.
        serves: whether this member opens the store. The trainer does.

    Raises:
        RequestError: the backend is unknown, or not there on this device.
    """

    def __init__(
        self, asked: JoinGroup, rank: int, device: torch.device, *, serves: bool = False
    ) -> None:
        kind = _DEVICES.get(asked.backend)
        if kind is None or (kind == "cuda" and device.type != "cuda"):
            raise RequestError(
                f"backend {asked.backend!r} does not serve device {device}: gloo serves any, nccl "
                "serves GPUs",
                "backend",
            )
        if not 0 <= rank < asked.world_size:
            raise RequestError(
                f"rank {rank} is outside of a group of world_size={asked.world_size}", "rank_offset"
            )
        limit = timedelta(seconds=asked.timeout)
        store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            asked.address, asked.port, asked.world_size, serves, limit, wait_for_workers=False
        )
        # The device is a part of the keys.
        for prefix in (asked.group, f"{asked.group}/", f"{kind}/"):
            store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        # A broadcast by gloo goes through host memory.
        self._device = torch.device("cpu") if asked.backend == "gloo" else device
        self._group: Any
        if asked.backend == "gloo":
            self._group = dist.ProcessGroupGloo(store, rank, asked.world_size, limit)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = dist.ProcessGroupNCCL(store, rank, asked.world_size, options)

    def send(self, tensors: Sequence[Tensor], src: int = 0) -> None:
        """Broadcasts tensors in order, and waits until they are sent."""
        for tensor in tensors:
            self._broadcast(tensor.detach().contiguous().to(self._device), src)

    def receive(self, tensors: Sequence[TensorEntry], src: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors that member `src` broadcasts, with their names. A tensor is valid
        until the next one."""
        for info in tensors:
            tensor = torch.empty(info.shape, dtype=DTYPES[info.dtype], device=self._device)
            self._broadcast(tensor, src)
            yield info.name, tensor

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        # Bytes, because not every backend sends every dtype.
        work = self._group.broadcast([tensor.view(-1).view(torch.uint8)], options)
        work.wait()
