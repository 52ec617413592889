"""Host memory in which the heads of steps meet those who make their inputs.

Threads and processes map it. A step's head reads lines of words from it, and waits for flags there.
The device writes what the inputs are made from into it: the results of steps, and their claims.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from quire.arrays import Int32, int32
from quire.errors import QuireError

DEPTH = 64
"""Steps whose results and claims are kept."""
_EVER = np.iinfo(np.int64).max
_WORD = 0xFFFFFFFF
_POLL_SECONDS = 1e-4
"""Seconds between two reads of a flag that another process sets."""
_ALIGNED = 64

Memory = np.ndarray[Any, np.dtype[np.int8]]


class OverwrittenError(QuireError):
    """Whoever asks for a step's results or claims asks too late."""


class InputShape(msgspec.Struct, frozen=True):
    """The sizes of `InputMemory`.

    Attributes:
        lanes: Number of lanes.
        lines: Lines of a lane, one for each logit row that a row may have.
        words: 32-bit words of a line.
        results: Words of a row's result.
        claims: Tokens of a claim; 0: no row has drafts.
        sets: Sets of lines of a lane, which steps use in turn.
    """

    lanes: int
    lines: int
    words: int
    results: int = 3
    claims: int = 0
    sets: int = 1

    @property
    def parts(self) -> list[tuple[type[Any], tuple[int, ...]]]:
        """The arrays of the memory, in order."""
        rows = DEPTH, self.lanes
        return [
            (np.int64, (self.lanes,)),
            (np.int64, (2, self.lanes)),
            (np.int64, (self.lanes,)),
            (np.int64, (2,)),
            (np.float64, (*rows, 2)),
            (np.int32, (*rows, self.results)),
            (np.int32, (*rows, self.claims)),
            (np.int32, rows),
            (np.int32, (self.lanes * self.sets * self.lines, self.words)),
        ]

    @property
    def size(self) -> int:
        """The bytes of the memory."""
        return sum(_aligned(_bytes(*part)) for part in self.parts)


def _bytes(kind: type[Any], shape: tuple[int, ...]) -> int:
    return math.prod(shape) * np.dtype(kind).itemsize


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


class InputMemory:
    """The arrays of the memory.

    A lane has a flag, which names the last step whose inputs are in place. A GPU waits without the
    host: a kernel of the step's head polls the flags of the step's rows, and later steps queue up.
    The inputs of a lane's next row need the result of the last row. So with one rank one set of
    lines per lane is enough. With several ranks, that result comes from the first rank, while
    others may still read the lines of the last row. Then there is one set more than steps in
    flight. A step is planned after the result of a step behind the last user of its set, and a
    step's body needs all ranks. So all ranks have read the set.

    One thread at a time writes a lane's lines and its flag: that of the lane's turn.

    Args:
        memory: int8 [`shape.size`].
        remote: Whether other processes set flags.

    Attributes:
        shape: The sizes.
        flags: int64 [lanes], 1 + the last step with complete inputs.
        verdicts: int64 [2, lanes], see `ops.reference.mask.InputFlags`.
        turns: int64 [lanes], which admission to the lane may write its lines.
        times: float64 [DEPTH, lanes, 2], the moments at which the masks of a lane's row in a step
            were begun and were in place, for traces (`time.perf_counter`).
        results: int32 [DEPTH, lanes, words], by step and row.
        claim_ids: int32 [DEPTH, lanes, tokens], by step and lane.
        claim_starts: int32 [DEPTH, lanes].
        newest: int64 [2], 1 + the last step whose results have arrived, and the same for claims.
        file: A file that other processes map, and where in it the memory begins; None: it has none.
        on_arrival: Called when this process has written results or claims.
    """

    def __init__(self, shape: InputShape, memory: Memory, *, remote: bool = False) -> None:
        self.shape, self._memory, self._remote = shape, memory, remote
        views, start = list[Any](), 0
        for kind, sizes in shape.parts:
            size = _bytes(kind, sizes)
            views.append(memory[start : start + size].view(kind).reshape(sizes))
            start += _aligned(size)
        self.flags, self.verdicts, self.turns, self.newest, self.times = views[:5]
        self.results, self.claim_ids, self.claim_starts, self._lines = views[5:]
        self._flags, self._newest = memoryview(self.flags), memoryview(self.newest)
        self._changed = threading.Condition()
        self.file: tuple[int, int] | None = None
        self.on_arrival: Callable[[], None] = lambda: None

    # -- inputs --------------------------------------------------------------------------------

    def buffer(self) -> Int32:
        """Returns the memory of all lines, int32 [lanes * sets * lines, words].

        A line is a mask over the vocabulary: a token is allowed if its bit is set.
        """
        lines: Int32 = self._lines
        return lines

    def first_lines(self, step_id: int, lanes: Int32) -> Int32:
        """Returns the first line of each lane's row in a step, int32 [lanes]."""
        shape = self.shape
        return (lanes * shape.sets + step_id % shape.sets) * shape.lines

    def copy_line(self, from_step: int, to_step: int, lane: int) -> None:
        """Copies the first line of a lane's late row to the step that continues the row."""
        source, target = (
            int(self.first_lines(step, int32([lane]))[0]) for step in (from_step, to_step)
        )
        if source != target:
            self._lines[target] = self._lines[source]

    def put(self, step_id: int, lane: int) -> None:
        """Says that the inputs of a lane's row in a step are in its lines.

        The rows of a step may come before or after the step is submitted. A flag never decreases.
        """
        # The lock orders the writes of lines before those of flags, which not all machines do.
        with self._changed:
            self._flags[lane] = max(self._flags[lane], step_id + 1)
            self._changed.notify_all()

    def has(self, step_id: int, lanes: Int32, *, wait: bool) -> bool:
        """Whether the inputs of all these lanes are there. With `wait`, waits for them first."""
        while True:
            with self._changed:
                there = bool((self.flags[lanes] > step_id).all())
                if there or not wait:
                    return there
                # Another process sets a flag without notifying this one's threads.
                self._changed.wait(_POLL_SECONDS if self._remote else None)

    @staticmethod
    def gate(step_id: int) -> tuple[int, int]:
        """Returns the low and the high word of the value that the op `wait_for_inputs` awaits."""
        low, high = (step_id + 1) & _WORD, (step_id + 1) >> 32
        return low - (low >> 31 << 32), high

    # -- what inputs are made from -------------------------------------------------------------

    def result(self, step_id: int, row: int) -> list[int] | None:
        """Returns a row's result: the number of new tokens, a `StopReason`, and the tokens.

        Returns None if it has not arrived. Only steps with GATED rows have results here.

        Raises:
            OverwrittenError: a later step may have taken the place.
        """
        if self._newest[0] <= step_id:
            return None
        found: list[int] = self.results[step_id % DEPTH, row].tolist()
        self._check(0, step_id)
        return found

    def claim(self, step_id: int, lane: int) -> tuple[Int32, int] | None:
        """Returns the claim that a step's body reads for a lane: ids, int32 [W], and their start.

        Returns None if it has not arrived. Only steps whose GATED rows verify drafts have claims.

        Raises:
            OverwrittenError: a later step may have taken the place.
        """
        if self._newest[1] <= step_id:
            return None
        place = step_id % DEPTH
        found = self.claim_ids[place, lane].copy(), int(self.claim_starts[place, lane])
        self._check(1, step_id)
        return found

    def _check(self, kind: int, step_id: int) -> None:
        if self._newest[kind] > step_id + DEPTH // 2:
            raise OverwrittenError(f"step {step_id} was overwritten")

    def close(self) -> None:
        """Sets all flags to their largest value, so that nothing waits any more. Idempotent."""
        with self._changed:
            self.flags[:] = _EVER
            # An even verdict: the row is not late.
            self.verdicts[:] = _EVER - 1
            self._changed.notify_all()


def memory_file(size: int) -> int:
    """Returns the descriptor of a new file that lies in memory and has no name."""
    if hasattr(os, "memfd_create"):
        found = os.memfd_create("quire-inputs")
    else:
        with tempfile.TemporaryFile() as file:
            found = os.dup(file.fileno())
    os.ftruncate(found, size)
    return found


def map_file(file: int, start: int, size: int) -> Memory:
    """Maps a part of a file. Writes reach all who map it."""
    page = start % mmap.ALLOCATIONGRANULARITY
    mapped = mmap.mmap(file, page + size, offset=start - page)
    return np.frombuffer(mapped, np.int8)[page:]
