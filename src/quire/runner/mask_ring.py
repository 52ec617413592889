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
    """A ring of host copies of the claims, each as the body of one step reads them.

    The copy is queued after the step's drafts are made and before its body, so that the host builds
    masks while the body runs. A step's place is free again when the step was collected, so the ring
    has more places than there are steps in flight.

    Args:
        depth: number of places.
        ids: int32 [lanes, W], a column on the device.
        start: int32 [lanes], a column on the device.
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
            # With blocking=True a thread that waits for the event sleeps.
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
        """Returns a step's claims, ids int32 [lanes, W] and start int32 [lanes].

        They hold until the step is collected. Returns None if they have not come; with `wait`, only
        if the ring was closed. From any thread, before or after `send`.
        """
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
        """Wakes every thread that waits, for good. Idempotent."""
        with self._sent:
            self._closed = True
            self._sent.notify_all()


# Masks of steps that have been launched already.

_EVER = np.iinfo(np.int64).max
_WORD = 0xFFFFFFFF
_GLANCE = 2e-4
"""Seconds between looks at a flag that another process sets."""


class MaskRing:
    """A ring of masks in host memory, each with a flag that names the last step it was put for.

    A GPU waits by itself: a kernel of the step's head polls the flag, and later steps queue up. A
    step's place is free again when the step was collected, so the ring has more places than there
    are steps in flight. All ranks use the same memory.

    Args:
        depth: number of places.
        rows: most lines of a mask; a mask has one for each logit row of a GATED row.
        words: 32-bit words of a line.
        memory: int8 [`size`], or None to allocate it.

    Attributes:
        masks: int32 [depth * rows, words], pinned for a GPU.
        flags: int64 [depth], pinned for a GPU.
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

    def buffer(self, step_id: int, rows: int) -> Int32:
        """Returns memory to build a step's mask in, int32 [rows, words]. From any thread."""
        first = self.first_line(step_id)
        return self._host[first : first + rows]

    def put(self, step_id: int, mask: Int32) -> None:
        """Sets a step's mask, int32 [lines, words]. From any thread."""
        buffer = self.buffer(step_id, len(mask))
        if not np.may_share_memory(buffer, mask):
            buffer[:] = mask
        place = step_id % len(self._host_flags)
        with self._brought:
            self._host_flags[place] = max(step_id + 1, self._host_flags[place])
            self._brought.notify_all()

    def has(self, step_id: int, *, wait: bool) -> bool:
        """Whether a step's mask is there. With `wait`, waits for it first."""
        place = step_id % len(self._host_flags)
        while True:
            with self._brought:
                if self._host_flags[place] > step_id or not wait:
                    return bool(self._host_flags[place] > step_id)
                # Another process sets a flag without notifying this one's threads.
                self._brought.wait(_GLANCE if self._shared else None)

    def first_line(self, step_id: int) -> int:
        """Returns the line of `masks` at which a step's mask begins."""
        return step_id % len(self._host_flags) * self._rows

    def gate(self, step_id: int) -> tuple[int, int, int]:
        """Returns the arguments of the op `wait_for_flag`.

        They are the flag's place, and the low and the high word of the value to wait for.
        """
        low, high = (step_id + 1) & _WORD, (step_id + 1) >> 32
        return step_id % len(self._host_flags), low - (low >> 31 << 32), high

    def close(self) -> None:
        """Sets all flags, for good, so that nothing waits any more. Idempotent."""
        with self._brought:
            self._host_flags[:] = _EVER
            self._brought.notify_all()
        if self._pinned:
            # A step in flight may still poll a flag.
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
