"""Tells the engines that read this one's cache which layers have stored the KV of which step.

The clock is a count in memory that other processes map. After layer i of step n, of L layers, it is
n * L + i + 1. The device writes it between kernels, also from within a captured body, as what it
counts from is a number on the device that is set before each step.
"""

from __future__ import annotations

import functools
import mmap
import os
from typing import Any

import numpy as np
import torch
from torch import nn

from quire.config import EngineConfig
from quire.disagg.settings import read_settings
from quire.models.decoder import Decoder
from quire.ops import op
from quire.ops.reference import layer_clock as twins
from quire.runner.hooks.hook import Hook
from quire.runner.mask_ring import pin, unpin
from quire.runner.readback import Step
from quire.runner.transfer.shared_memory import CLOCK_BEGIN, SharedMemory, map_shared

_set_clock = op(twins.set_clock)

_NEVER = -1 << 40
"""The count before the first step: no reader waits for so little."""


def open_layer_clock(config: EngineConfig) -> Hook:
    """Returns the hook of an engine with peers: a clock where they read layer by layer."""
    return LayerClock() if read_settings(config.args.kv_peers or {}).layers else Hook()


class LayerClock(Hook):
    """Answers `layer_clock` with the memory of the clocks of all ranks, int64 [ranks] from
    `CLOCK_BEGIN` on."""

    def __init__(self) -> None:
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
            # Attention has stored the layer's KV by then, that of both halves of a step too.
            mlp: nn.Module = layer.mlp  # type: ignore[assignment]
            mlp.register_forward_pre_hook(functools.partial(self._stored, index + 1))

    def _stored(self, layers: int, *_: Any) -> None:
        _set_clock(self._before, layers, self._clock)

    def begin(self, step: Step) -> None:
        self._before.fill_(step.plan.step_id * self._layers)

    def on_control(self, message: dict[str, Any]) -> Any:
        return self._handle if message.get("op") == "layer_clock" else None

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle.descriptor)
            self._handle = None
        if self._pinned is not None:
            # A step may still write it.
            torch.cuda.synchronize()
            unpin(self._pinned)
            self._pinned = None
