"""Shared memory that tells another process how many steps the engine has launched and read."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_LAUNCHED, _READ, _LAST = 0, 1, 2
"""Words of the memory: the two counts, and the time of the last change, in ns of the monotonic
clock."""


class StepCounts:
    """Counts steps in memory that two processes map. descriptor: descriptor of the memory's
    file."""

    def __init__(self, descriptor: int) -> None:
        self._words = memoryview(mmap.mmap(descriptor, mmap.PAGESIZE)).cast("q")

    @classmethod
    def make(cls) -> tuple[int, StepCounts]:
        """Makes the memory. Returns its descriptor, which the caller closes, and the counts."""
        descriptor = os.memfd_create("quire-step-counts")
        os.ftruncate(descriptor, mmap.PAGESIZE)
        return descriptor, cls(descriptor)

    def launch(self) -> None:
        """Notes that a step is about to be launched."""
        self._words[_LAUNCHED] += 1
        self._words[_LAST] = time.monotonic_ns()

    def read(self) -> None:
        """Notes that a step's result was read."""
        self._words[_READ] += 1
        self._words[_LAST] = time.monotonic_ns()

    @property
    def launched(self) -> int:
        """Returns the number of launched steps."""
        return self._words[_LAUNCHED]

    @property
    def idle_seconds(self) -> float:
        """Returns the seconds since the last step ended; 0 while a step runs."""
        if self._words[_LAUNCHED] != self._words[_READ]:
            return 0.0
        return max(0.0, 1e-9 * (time.monotonic_ns() - self._words[_LAST]))


class IdleTurn:
    """Runs pieces of work while an engine is idle. If a step came meanwhile, runs the piece again.

    Args:
        counts: the engine's step counts.
        settle: waits until the device has finished a piece of work.
        quiet: seconds without a step after which the engine counts as idle.
        pause: seconds between two checks.
    """

    def __init__(
        self, counts: StepCounts, settle: Callable[[], object], *, quiet: float = 0.25,
        pause: float = 0.02,
    ) -> None:  # fmt: skip
        self._counts = counts
        self._settle = settle
        self._quiet = quiet
        self._pause = pause

    def __call__(self, work: Callable[[], T], /) -> T:
        while True:
            while self._counts.idle_seconds < self._quiet:
                time.sleep(self._pause)
            before = self._counts.launched
            result = work()
            self._settle()
            # A step that ran meanwhile slows the work down, so it is timed again.
            if self._counts.launched == before:
                return result
