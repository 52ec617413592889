"""The executor of several ranks, each in a process of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig
from quire.engine.loop.stats import RankStats
from quire.engine.processes import MEMORY, PREFIX, remove_stale, take_ownership
from quire.engine.ranks.nodes import accept_workers, rendezvous_of
from quire.engine.ranks.rank_watch import RankWatch
from quire.engine.ranks.ranks import config_of_rank, open_worker, ranks_of_node
from quire.engine.ranks.remote_worker import (
    Allocate,
    Capture,
    Collect,
    LocalWorker,
    Measure,
    RemoteWorker,
    Run,
    Setup,
    ToWorker,
    WorkerShutdown,
    encode,
)
from quire.engine.ranks.shared_memory import FlightRecorder, share
from quire.errors import EngineDeadError
from quire.executor import Answered, Asked, Capacity, Executor, OnProgress, WorkerCall
from quire.features.loop_feature import Failure, LoopFeature
from quire.input_memory import InputMemory
from quire.parallel.torch_group import abort_group, check_no_group, leave_group
from quire.plan import StepPlan, StepResult
from quire.runner import Hook
from quire.scheduler import Feature

if TYPE_CHECKING:
    from quire.engine.ranks.ray_placement import RayPlacement

RANK_STATS: WorkerCall[None, list[RankStats]] = WorkerCall("ranks.stats")
RANK_NEWS: WorkerCall[None, int] = WorkerCall("ranks.news")
"""Returns the descriptor that becomes readable when a rank ends. From then on it fails with the
rank's error."""


class Ranks(LoopFeature):
    """Asks the executor for the ranks' statistics, and wakes the engine's loop when a rank ends."""

    def __init__(self, config: EngineConfig) -> None:
        self._executor: Executor | None = None

    def start(self, executor: Executor, capacity: Capacity) -> Feature | None:
        self._executor = executor
        return Feature()

    def fds(self) -> Sequence[int]:
        return () if self._executor is None else (self._executor.call(RANK_NEWS, None),)

    def poll(self, patience: float) -> tuple[Sequence[str], Sequence[Failure]]:
        if self._executor is not None:
            self._executor.call(RANK_NEWS, None)
        return (), ()

    def stats(self) -> dict[str, Any]:
        return {} if self._executor is None else {"ranks": self._executor.call(RANK_STATS, None)}


# The executor of several ranks: the first worker in this process, others in their own.

_STEP_SECONDS = 60.0
_EAGER_STEP_SECONDS = 600.0
"""Seconds that a step may take. The limit is longer without captured programs, because a step may
then compile kernels."""
_LEAVE_SECONDS = 5.0


class WorkerExecutor:
    """Fans plans out to the workers of all ranks.

    All ranks sample; in a pipeline only those of the last stage. The engine uses the results of
    the first rank.

    Args:
        world: Number of ranks.
        timeout: Most seconds of a step; None: a default.

    Attributes:
        local: Worker of the first rank.
        workers: Workers of the other ranks, in order.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: OnProgress | None = None,
        hooks: Sequence[Hook] = (),
        world: int = 2,
        timeout: float | None = None,
    ) -> None:
        check_no_group()  # Checked first, because ending this engine would leave another's group.
        self._captured = config.device != "cpu" and not config.eager
        timeout = timeout or (_STEP_SECONDS if self._captured else _EAGER_STEP_SECONDS)
        self._ended = False
        self.workers: list[RemoteWorker] = []
        self._watch: RankWatch | None = None
        self._placement: RayPlacement | None = None
        remove_stale()
        place = MEMORY if os.access(MEMORY, os.W_OK) else None
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX, dir=place)
        folder = self._folder.name
        self._lock = take_ownership(Path(folder))
        share(hooks, config, folder, create=True)
        each = ranks_of_node(config, world)
        self._recorder = FlightRecorder(folder, each, create=True)
        self._launched: deque[int] = deque()
        devices: Sequence[str] = ()
        try:
            if config.args.distributed_executor == "ray":
                # Imported here because it imports ray.
                from quire.engine.ranks.ray_placement import RayPlacement

                self._placement = RayPlacement(config, world)
                config, devices = self._placement.config, self._placement.devices
            own = config_of_rank(config, 0, devices)
            rendezvous = f"file://{folder}/ranks"
            if config.args.nnodes > 1:
                rendezvous = rendezvous_of(config.args)
                self.workers += accept_workers(config, world, timeout, self._check_placement)
            for rank in range(1, each):
                own_config = config_of_rank(config, rank, devices)
                setup = Setup(own_config, rank, world, rendezvous, folder, timeout)
                self.workers.append(LocalWorker(setup))
            self._watch = RankWatch(self.workers, self._recorder, self._abort, timeout)
            with self._watch.waiting(limited=False):
                self._group, self.local = open_worker(
                    own, rendezvous, 0, world, timeout, progress, hooks
                )
        except BaseException:
            self.shutdown()
            raise

    def _abort(self) -> None:
        """Aborts this process's collectives and other waits for ranks. `RankWatch` calls it from
        its thread."""
        abort_group()
        if "_group" in self.__dict__:
            self._group.end_waits()

    def _check_placement(self) -> None:
        if self._placement is not None:
            self._placement.check()

    def start(self) -> Capacity:
        """Starts all ranks. Each gets as many blocks as the rank with the least room can hold."""
        try:
            return self._start()
        except BaseException:
            self.shutdown()
            raise

    def _start(self) -> Capacity:
        with self._watched.waiting(limited=False):
            self._call(Measure())
            found = [self.local.measure()]
            for worker in self.workers:
                measurement = worker.answer().measurement
                if measurement is not None:
                    found.append(measurement)
            # The drafter's KV groups come after the others, and only in the last stage.
            rooms = itertools.zip_longest(*(m.num_blocks for m in found))
            blocks = tuple(min(n for n in counts if n is not None) for counts in rooms)
            self._call(Allocate(blocks))
            self.local.allocate(blocks)
            self._await()
            self._call(Capture())
            capacity = self.local.capture()
            self._recorder.holds(0, self.local)
            self._await()
            if self._captured:
                self._group.started()
        return capacity

    @property
    def _watched(self) -> RankWatch:
        if self._watch is None:
            raise EngineDeadError("the engine was shut down")
        return self._watch

    def _call(self, message: ToWorker) -> None:
        data = encode(message)
        for worker in self.workers:
            worker.send_bytes(data)

    def _await(self) -> None:
        for worker in self.workers:
            worker.answer()

    def submit(self, plan: StepPlan) -> None:
        with self._watched.waiting():
            self._call(Run(plan))
            self._recorder.launched(0, plan.step_id)
            self._launched.append(plan.step_id)
            self.local.submit(plan)

    def host_inputs(self) -> InputMemory:
        return self.local.host_inputs()

    def collect(self) -> StepResult:
        with self._watched.waiting():
            self._call(Collect())
            result = self.local.collect()
            step_id = self._launched.popleft()
            self._recorder.read(0, step_id, result.gpu_us)
            self._group.check(step_id)
        return result

    def call(self, call: WorkerCall[Asked, Answered], request: Asked) -> Answered:
        own = self._calls.get(call)
        return self.local.call(call, request) if own is None else own()

    @property
    def _calls(self) -> Mapping[WorkerCall[Any, Any], Callable[[], Any]]:
        return {RANK_STATS: self._recorder.stats, RANK_NEWS: self._news}

    def _news(self) -> int:
        if self._watched.error is not None:
            raise self._watched.error
        return self._watched.news

    def shutdown(self) -> None:
        if self._ended:
            return  # The process may be in the group of another engine by now.
        self._ended = True
        broken = self._watch is not None and self._watch.error is not None
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if not broken:
            with contextlib.suppress(EngineDeadError):
                self._call(WorkerShutdown())
        if "local" in self.__dict__:
            self.local.shutdown()
        # A thread leaves the group because NCCL may wait for ranks that are gone.
        leaving = threading.Thread(target=leave_group, args=(broken,), daemon=True)
        leaving.start()
        leaving.join(_LEAVE_SECONDS)
        for worker in self.workers:
            worker.stop(at_once=broken)
        self.workers = []
        if self._placement is not None:
            self._placement.close()
        self._folder.cleanup()
        if self._lock is not None:
            self._lock.close()
