"""Threads that build the masks of steps, in a few batches a step."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from quire.features.structured_output.masks import GrammarState, MaskRow

_HELPERS = 0
"""Threads besides the first one, at most."""
_FEW = 6
"""Rows that make no more than two batches."""
_LEARNING = 0.3
"""Weight of the newest batch in a row's cost."""
_PATIENCE = 1.0
"""Seconds that the end of a thread is waited for."""

Work = Callable[[], None]


class OnEntry:
    """Calls a function once all of a number of threads have left the interpreter."""

    def __init__(self, count: int, then: Work) -> None:
        self._left = count
        self._then = then
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._then()


class Item(Protocol):
    """A row of a step, and its masks."""

    @property
    def lane(self) -> int: ...

    @property
    def masks(self) -> MaskRow: ...


ItemType = TypeVar("ItemType", bound=Item)


@dataclass(slots=True, eq=False)
class MaskBatch(Generic[ItemType]):
    """Rows of a step whose masks one call builds.

    Attributes:
        items: The rows.
        built: Set when nothing of the batch uses the rows' states or their lines any more.
    """

    items: Sequence[ItemType]
    built: threading.Event = field(default_factory=threading.Event)

    def shares(self, lanes: set[int], states: set[int]) -> bool:
        """Whether the batch has one of these lanes, or of these states by their `id`."""
        return any(item.lane in lanes or id(item.masks.state) in states for item in self.items)


class MaskThreads:
    """Runs steps in order on a first thread, and the dearer batches of a step on others.

    A step's rows are sorted by what their last masks took. The cheaper half is the first batch, and
    an eighth, the dearest, the last one. So a dear mask holds up few rows. A batch's rows share the
    time of the batch, so a row that is not dear itself moves forward in later steps.

    Threads of llguidance's own do the work. All batches share them.
    """

    def __init__(self, helpers: int | None = None) -> None:
        if helpers is None:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
            helpers = max(0, min(_HELPERS, cores - 1))
        self._works = [SimpleQueue[Work | None]() for _ in range(1 + helpers)]
        # They may wait for a step that never runs, which must not keep a program from ending.
        threads = [
            threading.Thread(target=_run_all, args=(works,), name=f"masks-{i}", daemon=True)
            for i, works in enumerate(self._works)
        ]
        for thread in threads:
            thread.start()
        self.close = weakref.finalize(self, _end, self._works, threads)
        self._running: list[MaskBatch[Any]] = []

    def put(self, work: Work) -> None:
        """Queues a step's work, which calls `run`, on the first thread."""
        self._works[0].put(work)

    def run(
        self,
        items: Sequence[ItemType],
        build: Callable[[MaskBatch[ItemType], Work], None],
        entered: Work,
    ) -> None:
        """Builds the rows' masks, some of them on other threads. Called on the first thread.

        Args:
            build: Builds a batch's masks. It calls its second argument when other threads may have
                the interpreter for a while.
            entered: Called when all batches have done that.
        """
        self._wait_for_others(items)
        batches = self._batches(items)
        on_entry = OnEntry(len(batches), entered)
        for works, batch in zip(self._works[1:], batches[1:], strict=False):
            self._running.append(batch)
            works.put(partial(_build, batch, build, on_entry))
        for batch in batches[:1]:
            _build(batch, build, on_entry)

    def _wait_for_others(self, items: Sequence[Item]) -> None:
        """Waits for batches of earlier steps that still use a row's state, or its lane's lines.

        They are those of a request that was preempted or aborted, or whose row has just got its
        mask.
        """
        self._running = [batch for batch in self._running if not batch.built.is_set()]
        if self._running:
            lanes = {item.lane for item in items}
            states = {id(item.masks.state) for item in items}
            for batch in self._running:
                if batch.shares(lanes, states):
                    batch.built.wait()

    def _batches(self, items: Sequence[ItemType]) -> list[MaskBatch[ItemType]]:
        count, most = len(items), len(self._works)
        if count < 2 or most == 1:
            return [MaskBatch(items)]
        ordered = sorted(items, key=_cost)
        half = -(-count // 2)
        if count < _FEW or most == 2:
            return [MaskBatch(ordered[:half]), MaskBatch(ordered[half:])]
        last = count - max(1, count // 8)
        return [MaskBatch(ordered[:half]), MaskBatch(ordered[half:last]), MaskBatch(ordered[last:])]


def _cost(item: Item) -> float:
    state = item.masks.state
    if state is None or state.matcher is None:
        return 0.0
    strings = state.strings
    if strings is not None and strings.short and strings.base is not None:
        return 0.0
    return state.cost_us


def _build(
    batch: MaskBatch[ItemType], build: Callable[[MaskBatch[ItemType], Work], None], on_entry: Work
) -> None:
    began = time.perf_counter()
    first = True

    def entered() -> None:
        nonlocal first
        if first:
            on_entry()
        first = False

    try:
        build(batch, entered)
    finally:
        entered()
        took = 1e6 * (time.perf_counter() - began)
        for item in batch.items:
            learn(item.masks.state, took)
        batch.built.set()


def learn(state: GrammarState | None, took_us: float) -> None:
    """Moves a row's cost towards the time of a batch that it was in."""
    if state is not None:
        state.cost_us += _LEARNING * (took_us - state.cost_us)


def _run_all(works: SimpleQueue[Work | None]) -> None:
    """Runs what comes, until None comes."""
    while (work := works.get()) is not None:
        work()


def _end(queues: Sequence[SimpleQueue[Work | None]], threads: Sequence[threading.Thread]) -> None:
    """Ends the threads, which must not wake while the interpreter ends."""
    for works in queues:
        works.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(_PATIENCE)
