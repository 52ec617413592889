"""Inputs that the host makes while a step runs, and the claims that it makes them from."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.arrays import Int32
from quire.errors import QuireError
from quire.ops.reference.mask import InputFlags


class ClaimRing:
    """A ring of copies of the claims in host memory, one copy for each step.

    A copy is queued after the step's drafts are made and before its body, so that the host makes
    its inputs while the body runs. A step's place is free once the step has been collected, so the
    ring has more places than there are steps in flight.

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

        They stay valid until the step is collected. Returns None if they have not arrived; with
        `wait`, only if the ring was closed. From any thread, before or after `send`.
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
        """Wakes every waiting thread, and lets none wait any more. Idempotent."""
        with self._sent:
            self._closed = True
            self._sent.notify_all()


# Inputs of rows whose steps have already been launched.

_EVER = np.iinfo(np.int64).max
_WORD = 0xFFFFFFFF
_POLL_SECONDS = 2e-4
"""Seconds between two reads of a flag that another process sets."""

Memory = np.ndarray[tuple[int], np.dtype[np.int8]]


class HostInputs:
    """Lines of words in host memory that the head of a step reads: a few for each lane.

    A lane has a flag, which names the last step whose inputs are in place. A GPU waits without the
    host: a kernel of the step's head polls the flags of the step's rows, and later steps queue up.
    The host can make the inputs of a lane's next row only once it knows the result of the last row.
    So one set of lines per lane is enough, and a late row finds its inputs there when it is planned
    again. All ranks use the same memory.

    Args:
        lanes: number of lanes.
        lines: lines of a lane, one for each logit row that a row may have.
        words: 32-bit words of a line.
        memory: int8 [`size`], or None to allocate it.
        rank, world: this rank, and their number.

    Attributes:
        lines: int32 [lanes * lines, words], pinned for a GPU.
        per_lane: lines of a lane.
        flags: the flags that a head's kernel polls, pinned for a GPU.
    """

    def __init__(
        self,
        device: torch.device,
        lanes: int,
        lines: int,
        words: int,
        memory: Memory | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.per_lane = lines
        self._shared = memory is not None
        if memory is None:
            pinned = device.type == "cuda"
            size = self.size(lanes, lines, words)
            memory = torch.zeros(size, dtype=torch.int8, pin_memory=pinned).numpy()
        self._pinned = self._shared and device.type == "cuda"
        if self._pinned:
            pin(memory)
        self._memory = torch.from_numpy(memory)
        counts = self._memory[: 24 * lanes].view(torch.int64).view(3, lanes)
        self.flags = InputFlags(counts[0], counts[1:], rank, world)
        self.lines = self._memory[24 * lanes :].view(torch.int32).view(lanes * lines, words)
        self._host, self._host_flags = self.lines.numpy(), counts[0].numpy()
        self._arrived = threading.Condition()

    @staticmethod
    def size(lanes: int, lines: int, words: int) -> int:
        """Returns the bytes of the memory."""
        return 24 * lanes + 4 * lanes * lines * words

    def buffer(self) -> Int32:
        """Returns the memory of all lines, int32 [lanes * lines, words]. From any thread.

        Lane i has the lines from `i * per_lane` on.
        """
        return self._host

    def put(self, step_id: int, lanes: Int32) -> None:
        """Records that the inputs of these lanes' rows in a step are in their lines.

        From any thread. A flag never decreases.
        """
        with self._arrived:
            self._host_flags[lanes] = np.maximum(self._host_flags[lanes], step_id + 1)
            self._arrived.notify_all()

    def has(self, step_id: int, lanes: Int32, *, wait: bool) -> bool:
        """Whether the inputs of all these lanes are there. With `wait`, waits for them first."""
        while True:
            with self._arrived:
                there = bool((self._host_flags[lanes] > step_id).all())
                if there or not wait:
                    return there
                # Another process sets a flag without notifying this one's threads.
                self._arrived.wait(_POLL_SECONDS if self._shared else None)

    def gate(self, step_id: int) -> tuple[int, int]:
        """Returns the low and the high word of the value that the op `wait_for_inputs` awaits."""
        low, high = (step_id + 1) & _WORD, (step_id + 1) >> 32
        return low - (low >> 31 << 32), high

    def close(self) -> None:
        """Sets all flags to their largest value, so that nothing waits any more. Idempotent."""
        with self._arrived:
            self._host_flags[:] = _EVER
            # An even verdict: the row is not late.
            self.flags.verdicts.fill_(_EVER - 1)
            self._arrived.notify_all()
        if self._pinned:
            # A step in flight may still poll a flag.
            torch.cuda.synchronize()
            unpin(self._memory.numpy())
            self._pinned = False


def pin(memory: Memory) -> None:
    """Lets the device read memory that several processes map."""
    address, size = memory.ctypes.data, memory.nbytes
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = runtime.cudaHostRegister(address, size, 1)  # portable
    if int(error):
        raise QuireError(f"shared memory cannot be pinned for the GPU (CUDA error {int(error)})")


def unpin(memory: Memory) -> None:
    """Undoes `pin`. Must be called before the memory is unmapped, because its addresses may then be
    reused."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(memory.ctypes.data)
