"""The one copy to the device of a step, and the copies of its results back to the host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire import ops
from quire.arrays import Int32, int32
from quire.plan import RowFlag, StepPlan, StepResult

Array = np.ndarray[Any, Any]
Places = Array | Sequence[int]


class Upload:
    """One step's changes of the batch state, and arrays that its kernels read, in one copy.

    `put` and `put_lines` write into columns of the state's memory. `add` uploads an array, which is
    `upload[key]` after `send`, and lives until the step has used it.
    """

    def __init__(self, ring: PinnedRing, memory: Tensor) -> None:
        self._ring = ring
        self._memory = memory
        self._starts: list[Array] = []
        self._counts: list[Array] = []
        self._values: list[Int32] = []
        self._arrays: list[Int32] = []
        self._tensors: list[Tensor] = []

    def put(self, column: Tensor, starts: Places, counts: Places, values: Array) -> None:
        """Writes runs of words into a column. No two runs of an upload may overlap.

        Args:
            column: a dense view of the state's memory.
            starts: int [n], where each run starts, in words of the flattened column.
            counts: int [n], words of each run.
            values: int32 or float32, the runs one after the other.
        """
        self._starts.append(np.asarray(starts, dtype=np.int64) + int(column.storage_offset()))
        self._counts.append(np.asarray(counts, dtype=np.int64))
        self._values.append(_words(values))

    def put_lines(self, column: Tensor, lanes: Int32, values: Array) -> None:
        """Writes whole lines of a column.

        Args:
            lanes: int32 [n].
            values: [n, ...], of the column's dtype.
        """
        width = column[0].numel()
        self.put(column, lanes.astype(np.int64) * width, np.full(len(lanes), width), values)

    def add(self, array: Array) -> int:
        """Adds an int32 or float32 array, and returns its key."""
        self._arrays.append(_words(array))
        return len(self._arrays) - 1

    def send(self) -> None:
        """Copies everything to the device, and writes the columns."""
        values = [*self._values, *self._arrays]
        if not values:
            return
        counts = np.concatenate([*self._counts, np.empty(0, np.int64)])
        segments = np.empty((len(counts), 3), dtype=np.int32)
        if len(counts):
            segments[:, 0] = np.concatenate(self._starts)
            segments[:, 1] = counts
            segments[:, 2] = np.cumsum(counts) - counts
        packed = self._ring.copy([segments.reshape(-1), *values])
        if len(counts):
            ops.scatter(self._memory, packed, len(counts), int(counts.max()))
        at = segments.size + int(counts.sum())
        for array in self._arrays:
            self._tensors.append(packed[at : at + len(array)])
            at += len(array)

    def __getitem__(self, key: int) -> Tensor:
        return self._tensors[key]


def ragged(lanes: Int32, starts: Int32, stride: int) -> Array:
    """Returns the starts of runs for `Upload.put`, int64 [n]: `starts[i]` in line `lanes[i]`."""
    return lanes.astype(np.int64) * stride + starts


def _words(array: Array) -> Int32:
    if array.dtype not in (np.int32, np.float32):
        array = int32(array)
    return np.ascontiguousarray(array).reshape(-1).view(np.int32)


class PinnedRing:
    """A ring of pinned buffers, one more than there are steps in flight.

    A buffer is reused only after the copy that last read it has ended. Without a GPU there are no
    buffers.
    """

    def __init__(self, device: torch.device, depth: int) -> None:
        self.device = device
        self._next = 0
        self._buffers: list[Tensor | None] = [None] * depth
        self._read: list[Any] = [None] * depth

    def copy(self, parts: Sequence[Int32]) -> Tensor:
        """Returns the parts on the device, one after the other, int32 [sum of their sizes]."""
        if self.device.type != "cuda":
            return torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, np.int32))
        size = sum(len(part) for part in parts)
        i = self._next
        self._next = (i + 1) % len(self._buffers)
        # The copy has usually ended. `query` keeps the interpreter's lock, `synchronize` does not.
        if self._read[i] is not None and not self._read[i].query():
            self._read[i].synchronize()
        buffer = self._buffers[i]
        if buffer is None or len(buffer) < size:
            buffer = torch.empty(max(4096, 2 * size), dtype=torch.int32, pin_memory=True)
            self._buffers[i] = buffer
        if size:
            np.concatenate(parts, out=buffer.numpy()[:size])
        out = torch.empty(size, dtype=torch.int32, device=self.device)
        out.copy_(buffer[:size], non_blocking=True)
        self._read[i] = torch.cuda.current_stream(self.device).record_event()
        return out


# A step in flight, and the copies of its results, which the host reads later.


@dataclass(slots=True)
class Step:
    """A plan whose programs have been launched, or are launched next.

    Attributes:
        logit_start: int32 [R + 1], on the host: the first logit row of each row.
        waits: whether the head waits for missing host inputs, and is not launched yet.
        lines: int32 [lanes, W], the step's slot of `BatchState.ring`, or None if its head has not
            been launched.
        whole: whether the head was launched with the body.
        notes: values that hooks keep until they read the step's results.
        result: the step's result, which hooks add to; set by `wait`.
    """

    plan: StepPlan
    device: torch.device
    logit_start: Int32
    waits: bool = False
    lines: Int32 | None = None
    whole: bool = False
    notes: dict[str, Any] = field(default_factory=dict)
    result: StepResult = field(init=False)
    _sent: dict[str, Tensor] = field(default_factory=dict)
    _started: Any = None
    _done: Any = None

    @classmethod
    def begin(cls, plan: StepPlan, device: torch.device, before: Step | None = None) -> Step:
        """Returns a new step, and starts to measure its time.

        Args:
            before: the last step in flight. If it still runs, the new step begins when it ends.
        """
        step = cls(plan, device, logit_starts(plan))
        end = None if before is None or device.type != "cuda" else before._done
        follows = end is not None and not end.query()
        step._started = end if follows else step._mark()
        return step

    def send(self, name: str, values: Tensor) -> None:
        """Starts a copy to the host. `arrived` returns it once the step is done."""
        if self.device.type == "cuda":
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._sent[name] = host.copy_(values, non_blocking=True)
        else:
            self._sent[name] = values.clone()

    def arrived(self, name: str) -> Tensor | None:
        """Returns the values that were sent under a name, or None."""
        return self._sent.get(name)

    def launched(self) -> None:
        """Marks the end of the step on the device."""
        self._done = self._mark()

    def wait(self) -> None:
        """Waits until all copies have arrived, and sets `result`."""
        rows = self.plan.num_rows
        if self.device.type == "cuda":
            self._done.synchronize()
            gpu_us = self._started.elapsed_time(self._done) * 1e3
        else:
            gpu_us = (self._done - self._started) * 1e6
        if self.lines is not None:
            # A copy, because a later step writes to the slot.
            results = self.lines[:rows].copy()
        else:
            # No row has logits, so no row gives a token.
            results = np.full((rows, 3), -1, dtype=np.int32)
            results[:, :2] = 0
        if results.shape[1] > 3 and self.plan.q_len.max(initial=1) == 1:
            # No row has drafts, so that none gives a second token.
            results = results[:, :3]
        self.result = StepResult(
            step_id=self.plan.step_id,
            tokens=results[:, 2:],
            n_tokens=results[:, 0],
            stop_reason=results[:, 1],
            gpu_us=gpu_us,
        )

    def _mark(self) -> Any:
        """Returns a point in time on the device, an event on a GPU."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def logit_starts(plan: StepPlan) -> Int32:
    """Returns the first logit row of each row in the head, int32 [R + 1].

    A generating row has one for each of its tokens, and a PROMPT row has one if it samples. Logits
    for a prompt's log-probabilities are not part of the head.
    """
    prompt = (plan.flags & RowFlag.PROMPT) != 0
    samples = (plan.flags & RowFlag.SAMPLE) != 0
    starts = np.zeros(plan.num_rows + 1, dtype=np.int32)
    np.cumsum(np.where(prompt, samples, plan.n_logits), out=starts[1:])
    return starts
