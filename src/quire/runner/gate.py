"""Masks that other threads bring for steps that have been launched already."""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

from quire.arrays import Int32

_EVER = np.iinfo(np.int64).max


class HostGate:
    """On a CPU: what is behind a head that has no mask yet is launched later."""

    def __init__(self, words: int) -> None:
        self._words = words
        self._masks: dict[int, Int32] = {}
        self._news = threading.Condition()

    def room(self, step_id: int, rows: int) -> Int32:
        """Where the mask of a step may be built, int32 [rows, words]. From any thread."""
        return np.empty((rows, self._words), dtype=np.int32)

    def give(self, step_id: int, mask: Int32) -> None:
        """mask: int32 [gated rows, words]. From any thread."""
        with self._news:
            self._masks[step_id] = mask
            self._news.notify_all()

    def take(self, step_id: int, rows: int, *, wait: bool) -> Tensor | None:
        """A step's mask, of so many rows, once. None: it is not there, and `wait` is False."""
        with self._news:
            if wait:
                self._news.wait_for(lambda: step_id in self._masks)
            mask = self._masks.pop(step_id, None)
        return None if mask is None else torch.from_numpy(np.ascontiguousarray(mask))

    def queue(self, step_id: int, rows: int) -> Tensor | None:
        """What will be the mask, where the device can wait for it by itself."""
        return None

    def open(self) -> None:
        """Nothing will be waited for any more."""


class DeviceGate:
    """A GPU can wait, too: the head is queued behind a kernel that waits for the mask, and steps
    behind the head, so that there is nothing left to launch when the mask comes.

    Until it does, the thread that launches must not wait for the device, as a kernel's first launch
    does: what it would do next may be what the mask depends on. So only heads that are graphs are
    queued; the others' masks are taken as from a `HostGate`.

    A ring of pinned masks, each with a flag that says whose it is. A step's place is free again
    when the step was collected, so the ring is longer than steps in flight. depth: its length.
    rows, words: of a mask at most.
    """

    def __init__(self, device: torch.device, depth: int, rows: int, words: int) -> None:
        self._given = torch.zeros(depth, rows, words, dtype=torch.int32, pin_memory=True)
        self._flags = torch.full((depth,), -1, dtype=torch.int64, pin_memory=True)
        self._host, self._host_flags = self._given.numpy(), self._flags.numpy()
        self._mask = torch.empty(rows, words, dtype=torch.int32, device=device)
        self._news = threading.Condition()
        self._wait_on_device(0, -1)  # compiled and loaded now

    def room(self, step_id: int, rows: int) -> Int32:
        return self._host[step_id % len(self._host), :rows]

    def give(self, step_id: int, mask: Int32) -> None:
        place = step_id % len(self._host)
        room = self._host[place, : len(mask)]
        if not np.may_share_memory(room, mask):
            room[:] = mask
        with self._news:
            self._host_flags[place] = max(step_id, self._host_flags[place])
            self._news.notify_all()

    def take(self, step_id: int, rows: int, *, wait: bool) -> Tensor | None:
        place = step_id % len(self._host)
        with self._news:
            if wait:
                self._news.wait_for(lambda: self._host_flags[place] >= step_id)
            if self._host_flags[place] < step_id:
                return None
        return self._copied(place, rows)

    def queue(self, step_id: int, rows: int) -> Tensor | None:
        place = step_id % len(self._host)
        self._wait_on_device(place, step_id)
        return self._copied(place, rows)

    def _wait_on_device(self, place: int, step_id: int) -> None:
        from quire.ops.triton.gate import wait_for

        wait_for(self._flags[place : place + 1], step_id)

    def _copied(self, place: int, rows: int) -> Tensor:
        """On the device, until the next mask is."""
        return self._mask[:rows].copy_(self._given[place, :rows], non_blocking=True)

    def open(self) -> None:
        with self._news:
            self._host_flags[:] = _EVER
            self._news.notify_all()
