"""Masks and claims of steps in flight, shared with threads that build masks."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.arrays import Int32
from quire.errors import QuireError


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


# Masks that other threads bring for steps that have been launched already.

_EVER = np.iinfo(np.int64).max
_WORD = 0xFFFFFFFF
_GLANCE = 2e-4
"""Seconds between looks at a flag that another process sets."""


class MaskRing:
    """A ring of masks in host memory, each with a flag that names the last step it was brought for.

    A GPU waits by itself: the flag is looked at by a kernel of the step's head, and steps are
    queued behind. A step's place is free again when the step was collected, so the ring is longer
    than steps in flight. Ranks share one ring: they are given the same memory.

    depth: places. rows: lines of a mask, one for each logit row of a GATED row. words: of a line.
    memory: int8 [`size`], or None for memory of its own.
    masks: int32 [depth * rows, words]. flags: int64 [depth]. Both are pinned for a GPU.
    """

    def __init__(
        self,
        device: torch.device,
        depth: int,
        rows: int,
        words: int,
        memory: np.ndarray[tuple[int], np.dtype[np.int8]] | None = None,
    ) -> None:
        self._rows = rows
        self._shared = memory is not None
        if memory is None:
            pinned = device.type == "cuda"
            size = self.size(depth, rows, words)
            memory = torch.zeros(size, dtype=torch.int8, pin_memory=pinned).numpy()
        self._pinned = self._shared and device.type == "cuda"
        if self._pinned:
            pin(memory)
        self._memory = torch.from_numpy(memory)
        self.flags = self._memory[: 8 * depth].view(torch.int64)
        self.masks = self._memory[8 * depth :].view(torch.int32).view(depth * rows, words)
        self._host, self._host_flags = self.masks.numpy(), self.flags.numpy()
        self._brought = threading.Condition()

    @staticmethod
    def size(depth: int, rows: int, words: int) -> int:
        """Returns the bytes of a ring's memory."""
        return 8 * depth + 4 * depth * rows * words

    def room(self, step_id: int, rows: int) -> Int32:
        """Returns where the mask of a step may be built, int32 [rows, words]. From any thread."""
        first = self.first_line(step_id)
        return self._host[first : first + rows]

    def bring(self, step_id: int, mask: Int32) -> None:
        """Sets a step's mask, int32 [lines, words]. From any thread."""
        room = self.room(step_id, len(mask))
        if not np.may_share_memory(room, mask):
            room[:] = mask
        place = step_id % len(self._host_flags)
        with self._brought:
            self._host_flags[place] = max(step_id + 1, self._host_flags[place])
            self._brought.notify_all()

    def has(self, step_id: int, *, wait: bool) -> bool:
        """Tells whether a step's mask is there; with `wait`, once it is."""
        place = step_id % len(self._host_flags)
        while True:
            with self._brought:
                if self._host_flags[place] > step_id or not wait:
                    return bool(self._host_flags[place] > step_id)
                # Another process brings masks without a word to this one's threads.
                self._brought.wait(_GLANCE if self._shared else None)

    def first_line(self, step_id: int) -> int:
        """Returns the line of `masks` at which a step's mask begins."""
        return step_id % len(self._host_flags) * self._rows

    def gate(self, step_id: int) -> tuple[int, int, int]:
        """Returns what the op `wait_for_flag` waits for: the flag's place, and the low and the high
        word of the value that it then has at least."""
        low, high = (step_id + 1) & _WORD, (step_id + 1) >> 32
        return step_id % len(self._host_flags), low - (low >> 31 << 32), high

    def close(self) -> None:
        """Lets everything through, for good. Idempotent."""
        with self._brought:
            self._host_flags[:] = _EVER
            self._brought.notify_all()
        if self._pinned:
            # A step may still look at a flag.
            torch.cuda.synchronize()
            unpin(self._memory.numpy())
            self._pinned = False


def pin(memory: np.ndarray[tuple[int], np.dtype[np.int8]]) -> None:
    """Lets the device read memory that several processes map."""
    address, size = memory.ctypes.data, memory.nbytes
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = runtime.cudaHostRegister(address, size, 1)  # portable
    if int(error):
        raise QuireError(f"shared memory cannot be pinned for the GPU (CUDA error {int(error)})")


def unpin(memory: np.ndarray[tuple[int], np.dtype[np.int8]]) -> None:
    """Undoes `pin`, before the memory is unmapped and its addresses are given to others."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(memory.ctypes.data)
