"""Masks that other threads bring for steps that have been launched already.

On a GPU a step's head is queued at once, behind a kernel that waits for the mask: steps behind it
can be queued too, and when the mask comes there is nothing left for the host to launch. A CPU has
no queue, so there the runner waits itself.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

from quire.plan import Int32

_EVER = np.iinfo(np.int64).max


class HostGate:
    """On a CPU."""

    def __init__(self) -> None:
        self._masks: dict[int, Int32] = {}
        self._news = threading.Condition()

    def give(self, step_id: int, mask: Int32) -> None:
        """mask: int32 [gated rows, words]. From any thread."""
        with self._news:
            self._masks[step_id] = mask
            self._news.notify_all()

    def take(self, step_id: int, rows: int, *, wait: bool) -> Tensor | None:
        """The mask of a step with so many gated rows. None: it is not there, and `wait` is False.
        Once only."""
        with self._news:
            if wait:
                self._news.wait_for(lambda: step_id in self._masks)
            mask = self._masks.pop(step_id, None)
        return None if mask is None else torch.from_numpy(np.ascontiguousarray(mask))

    def open(self) -> None:
        """Nothing will wait any more."""


class DeviceGate:
    """On a GPU: a ring of pinned masks, each with a flag that says whose it is.

    A step's place in the ring is free again when the step was collected, so the ring is longer than
    steps in flight. depth: its length. rows, words: of a mask at most.
    """

    def __init__(self, device: torch.device, depth: int, rows: int, words: int) -> None:
        self._given = torch.zeros(depth, rows, words, dtype=torch.int32, pin_memory=True)
        self._flags = torch.full((depth,), -1, dtype=torch.int64, pin_memory=True)
        self._host, self._host_flags = self._given.numpy(), self._flags.numpy()
        self._mask = torch.empty(rows, words, dtype=torch.int32, device=device)

    def give(self, step_id: int, mask: Int32) -> None:
        """As `HostGate.give`."""
        place = step_id % len(self._host)
        self._host[place, : len(mask)] = mask
        self._host_flags[place] = max(step_id, self._host_flags[place])

    def take(self, step_id: int, rows: int, *, wait: bool) -> Tensor:
        """What will be the mask once the device is there. Valid until the next is taken."""
        from quire.ops.triton.gate import wait_for

        place = step_id % len(self._host)
        wait_for(self._flags[place : place + 1], step_id)
        return self._mask[:rows].copy_(self._given[place, :rows], non_blocking=True)

    def open(self) -> None:
        """Nothing waits any more, whatever has come. Else the device would, for the engine's last
        steps, and whoever waits for the device with it."""
        self._host_flags[:] = _EVER
