"""The claims of steps in flight, on their way to threads that build the masks of drafts."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.arrays import Int32


class ClaimRing:
    """A ring of copies of the claims, each as the body of one step reads it.

    A copy is queued behind what makes a step's drafts and before its body, so that masks are built
    while the body runs. A step's place is free again when the step was collected, so the ring is
    longer than steps in flight.

    depth: places. ids: int32 [lanes, W]. start: int32 [lanes]. Both are columns on the device.
    """

    def __init__(self, depth: int, ids: Tensor, start: Tensor) -> None:
        self._columns = ids, start
        device = ids.device
        pinned = device.type == "cuda"
        self._copies = [
            tuple(
                torch.empty(column.shape, dtype=torch.int32, pin_memory=pinned)
                for column in self._columns
            )
            for _ in range(depth)
        ]
        self._events: list[Any] = [
            # A thread that waits for one sleeps.
            torch.cuda.Event(blocking=True) if pinned else None  # type: ignore[no-untyped-call]
            for _ in range(depth)
        ]
        self._steps = np.full(depth, -1, dtype=np.int64)
        self._closed = False
        self._sent = threading.Condition()

    def send(self, step_id: int) -> None:
        """Queues the copy for a step."""
        place = step_id % len(self._steps)
        for copy, column in zip(self._copies[place], self._columns, strict=True):
            copy.copy_(column, non_blocking=True)
        if self._events[place] is not None:
            self._events[place].record()
        with self._sent:
            self._steps[place] = step_id
            self._sent.notify_all()

    def get(self, step_id: int, *, wait: bool) -> tuple[Int32, Int32] | None:
        """Returns a step's claims, ids int32 [lanes, W] and start int32 [lanes], which hold until
        the step is collected. None: they are not there, with `wait` that the ring was closed. From
        any thread, before or after `send`."""
        place = step_id % len(self._steps)
        with self._sent:
            while self._steps[place] < step_id and not self._closed:
                if not wait:
                    return None
                self._sent.wait()
            if self._steps[place] != step_id:
                return None
        event = self._events[place]
        if event is not None and wait:
            event.synchronize()
        elif event is not None and not event.query():
            return None
        ids, start = self._copies[place]
        return ids.numpy(), start.numpy()

    def close(self) -> None:
        """Lets those go who wait, for good. Idempotent."""
        with self._sent:
            self._closed = True
            self._sent.notify_all()
