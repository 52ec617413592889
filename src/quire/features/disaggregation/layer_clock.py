"""Layer-by-layer transfer: batches whose layers are not written yet, and a clock of the layers."""

from __future__ import annotations

import functools
import mmap
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import nn

from quire.config import EngineConfig
from quire.executor import WorkerCall
from quire.features.disaggregation.hook import PeerHook
from quire.features.disaggregation.messages import BlockBatch, GrantAccepted, Message
from quire.features.disaggregation.settings import read_settings
from quire.models.decoder import Decoder
from quire.ops import op
from quire.ops.reference import mask as twins
from quire.runner.hooks import Hook, HostHook
from quire.runner.host_inputs import pin, unpin
from quire.runner.readback import Step
from quire.runner.transfer.shared_memory import CLOCK_BEGIN, SharedMemory, map_shared


class _Link(Protocol):
    def send(self, message: Message) -> None: ...


Link = TypeVar("Link", bound=_Link)


class LayerBatches(Generic[Link]):
    """Batches of a prompt for its reader.

    The reader may connect during a step, and the loop notices it only after the step. So the thread
    of the reader's connection sends the batches that the loop has named so far. From any thread.

    Attributes:
        link: the reader's connection; None until a reader has shown the grant.
    """

    def __init__(self) -> None:
        self.link: Link | None = None
        self._named: list[BlockBatch] = []
        self._lock = threading.Lock()

    def send(self, batch: BlockBatch) -> None:
        """Sends a batch, or keeps it until the reader connects."""
        with self._lock:
            if self.link is None:
                self._named.append(batch)
            else:
                self.link.send(batch)

    def greet(self, link: Link) -> None:
        """Accepts the first reader, and sends it the batches so far. Later ones are ignored."""
        with self._lock:
            if self.link is None:
                self.link = link
                link.send(GrantAccepted(None))
                for batch in self._named:
                    link.send(batch)


# The clock shows readers of this engine's cache how many layers of a step have stored their KV.

_set_clock = op(twins.set_clock)

_NEVER = -1 << 40
"""The count before the first step. It is below every count that a reader waits for."""


LAYER_CLOCK: WorkerCall[None, SharedMemory] = WorkerCall("disaggregation.layer_clock")
"""Returns the memory of the clocks of all ranks, int64 [ranks] from `CLOCK_BEGIN` on."""


def open_hook(config: EngineConfig) -> Hook:
    """Returns the hook of an engine with peers. It has a clock if they read layer by layer."""
    settings = read_settings(config.args.kv_peers or {})
    kind = LayerClock if settings.layers else PeerHook
    return kind(settings.transport, config.device)


class LayerClock(PeerHook, HostHook):
    """Counts the layers of a step that have stored their KV."""

    def __init__(self, transport: str = "ipc", device: str = "cpu") -> None:
        super().__init__(transport, device)
        self._handle: SharedMemory | None = None
        self._pinned: Any = None

    def attach(self, model: Decoder) -> None:
        group = model.group
        memory, self._handle = map_shared(mmap.PAGESIZE, group, str(model.device))
        if model.device.type == "cuda":
            self._pinned = np.frombuffer(memory, dtype=np.int8)
            pin(self._pinned)
        clocks = np.frombuffer(memory, np.int64, group.world, CLOCK_BEGIN)
        self._clock = torch.from_numpy(clocks)[group.rank : group.rank + 1]
        self._before = torch.full((1,), _NEVER, dtype=torch.int64, device=model.device)
        self._layers = len(model.layers)
        for index, layer in enumerate(model.layers):
            # When the MLP runs, attention has stored the layer's KV, for both halves of a step.
            mlp: nn.Module = layer.mlp  # type: ignore[assignment]
            mlp.register_forward_pre_hook(functools.partial(self._stored, index + 1))

    def _stored(self, layers: int, *_: Any) -> None:
        _set_clock(self._before, layers, self._clock)

    def begin(self, step: Step) -> None:
        self._before.fill_(step.plan.step_id * self._layers)

    def calls(self) -> Mapping[WorkerCall[Any, Any], Callable[[Any], Any]]:
        return {**super().calls(), LAYER_CLOCK: lambda _: self._handle}

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle.descriptor)
            self._handle = None
        if self._pinned is not None:
            # A step may still write it.
            torch.cuda.synchronize()
            unpin(self._pinned)
            self._pinned = None
