"""The engine's loop: plan ahead, collect late, say what came of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from quire.arrays import Int32
from quire.config import EngineConfig
from quire.engine.telemetry import Histogram, Telemetry
from quire.engine.tiers import open_tiers
from quire.engine.trace import StepTrace
from quire.engine.trace_files import TraceFiles
from quire.errors import EngineDeadError, RequestError
from quire.executor import Executor
from quire.offload import OffloadFeature, TierStats
from quire.outputs import RequestTimes
from quire.plan import StepPlan
from quire.pooling import POOLING
from quire.pooling_params import Pooling
from quire.request import FinishReason, Request, RequestStatus
from quire.sampling_params import SamplingParams
from quire.scheduler import Feature, Scheduler, StepProgress
from quire.structured import GrammarFeature

_GOLDEN = 0x9E3779B97F4A7C15
"""An odd constant near 2**64 / golden ratio: multiples of it spread over all 64-bit words."""


_IDLE = 5e-3
"""Seconds to wait for a grammar when there is nothing else to do."""


_SAVE_SECONDS = 3.0
"""How long the end of an engine may take to write cached blocks to files."""


class EngineStats(msgspec.Struct):
    """Block counts are per KV group; the counters count since the start. prompt_tokens are those of
    the requests taken, generation_tokens those that were read from the device. evicted_blocks: that
    the device's cache gave up. copied_blocks: shared up to their middle only. swapped: preemptions
    after which blocks were to be brought back rather than computed again. set_back: of those
    waiting, how many ran before. tiers: None without any. histograms: see `Telemetry`.
    """

    running: int = 0
    waiting: int = 0
    set_back: int = 0
    blocks_total: list[int] = []
    blocks_used: list[int] = []
    blocks_cached: list[int] = []
    blocks_free: list[int] = []
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    evicted_blocks: int = 0
    copied_blocks: int = 0
    preemptions: int = 0
    swapped: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    tiers: TierStats | None = None
    histograms: dict[str, Histogram] = {}


class EngineCore:
    """Owns the scheduler and an executor. Single-threaded: whoever has it calls `add`, `abort` and
    `step` in turn.

    A request with `n` > 1 becomes `n` siblings, which share the prompt's blocks. The times of each
    are in its `state["times"]`, a `RequestTimes`.

    An error in a step leaves scheduler and device at odds: `failed` is then set for good, and
    nothing but `shutdown` and `stats` may be called.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        features: Sequence[Feature] = (),
        grammars: GrammarFeature | None = None,
    ) -> None:
        self.config = config
        folder = config.args.trace_dir
        files = None if folder is None else TraceFiles(Path(folder))
        self._executor = executor
        self.capacity = executor.start()
        self._grammars = grammars
        if grammars is not None:
            features = [*features, grammars]
            grammars.connect(executor)
        self._tiers = open_tiers(config, executor, self.capacity)
        if self._tiers is not None:
            features = [*features, self._tiers]
        self.scheduler = Scheduler(config.scheduler, self.capacity, features)
        self._siblings: dict[str, list[Request]] = {}
        self._seeds = 0
        self._prompt_tokens = 0
        self.telemetry = Telemetry(None if files is None else StepTrace(files, self.scheduler))
        self._unfit: list[tuple[Request, RequestError]] = []
        self.failed = False

    def add(
        self,
        request_id: str,
        prompt: Int32,
        params: SamplingParams,
        *,
        max_total: int,
        priority: int = 0,
        cache_salt: str = "",
        pooling: Pooling | None = None,
        tenant: str = "",
        share: float = 1.0,
    ) -> list[Request]:
        """Queues a validated request; its `n` completions in order. pooling: it gives a vector in
        place of tokens, with a `max_total` one above the prompt's length. tenant, share: see
        `Request`.

        Raises:
            OverloadedError: the queue is full.
            RequestError: it can never run, or a feature refused it. Nothing is queued then.
            EngineDeadError: a step has failed.
        """
        self._check_alive()
        if priority and self.config.scheduler.policy != "priority":
            raise RequestError(
                "'priority' needs an engine with scheduling_policy=priority", param="priority"
            )
        if params.structured_outputs is not None and self._grammars is None:
            raise RequestError("this engine has no grammars", "structured_outputs")
        seed = self._next_seed() if params.seed is None else params.seed
        requests: list[Request] = []
        arrival = time.monotonic()
        try:
            for index in range(params.n):
                request = Request(
                    f"{request_id}/{index}",
                    prompt,
                    params,
                    max_total=max_total,
                    arrival=arrival,
                    priority=priority,
                    seed=seed,
                    sample_index=index,
                    leader=requests[0] if requests else None,
                    cache_salt=cache_salt,
                    tenant=tenant,
                    share=share,
                )
                request.state["times"] = RequestTimes(arrival)
                if pooling is not None:
                    request.state[POOLING] = pooling
                self.scheduler.add(request)
                requests.append(request)
        except Exception:
            for request in requests:
                self.scheduler.abort(request.request_id)
            raise
        self._siblings[request_id] = requests
        self._prompt_tokens += len(prompt)
        return requests

    def _check_alive(self) -> None:
        if self.failed:
            raise EngineDeadError("the engine failed in an earlier step; start a new one")

    def _next_seed(self) -> int:
        """Requests without a seed get one from the engine's, by their order of arrival."""
        self._seeds += 1
        word = (self.config.args.seed + 1 + self._seeds * _GOLDEN) & (2**64 - 1)
        return word - 2**64 if word >= 2**63 else word

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or one of its completions, at once. Unknown or ended ones are ignored."""
        requests = self._siblings.get(request_id, [])
        for request in requests:
            if index is None or request.sample_index == index:
                self.scheduler.abort(request.request_id)
        self._forget_ended(request_id)

    def _forget_ended(self, request_id: str) -> None:
        if all(request.finished for request in self._siblings.get(request_id, ())):
            self._siblings.pop(request_id, None)

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def step(self) -> StepProgress | None:
        """Launches what can be launched, then reads the oldest step in flight. None: there was
        nothing to read. Whatever it raises is the engine's end."""
        self._check_alive()
        try:
            return self._step()
        except BaseException:
            self.failed = True
            raise

    def _step(self) -> StepProgress | None:
        scheduler, executor, grammars = self.scheduler, self._executor, self._grammars
        if grammars is not None:
            self._wake(grammars, 0.0)
        while scheduler.num_in_flight < self.config.scheduler.steps_in_flight:
            if grammars is not None and not grammars.settled:
                break
            begun = time.monotonic()
            plan = scheduler.plan()
            if plan is None:
                break
            planned = time.monotonic()
            if grammars is not None:
                grammars.begin()  # a first launch waits for the device, and that for the masks
            executor.submit(plan)
            self.telemetry.launched(plan, self._admitted(plan), begun, planned)
        if not scheduler.num_in_flight:
            if grammars is not None and grammars.parked:
                self._wake(grammars, _IDLE)
            return None
        begun = time.monotonic()
        result = executor.collect()
        collected = time.monotonic()
        progress = scheduler.update(result)
        if grammars is not None:
            grammars.begin()
        self.telemetry.read(progress, result.gpu_us, begun, collected)
        for place in progress.finished:
            self._forget_ended(progress.requests[place].request_id.rpartition("/")[0])
        return progress

    def _wake(self, grammars: GrammarFeature, patience: float) -> None:
        """Queues the requests whose grammars are there, and ends those that cannot have theirs."""
        for request_id in grammars.compiled(patience):
            self.scheduler.wake(request_id)
        for request, error in grammars.failures():
            if self.scheduler.abort(request.request_id, FinishReason.ERROR) is not None:
                self._unfit.append((request, error))
                self._forget_ended(request.request_id.rpartition("/")[0])

    def take_unfit(self) -> list[tuple[Request, RequestError]]:
        """Requests that had to end by an error of their own, each told once."""
        unfit, self._unfit = self._unfit, []
        return unfit

    @property
    def waits(self) -> bool:
        """Whether requests are parked until their grammar is compiled: a step may bring nothing."""
        return self._grammars is not None and self._grammars.parked

    def _admitted(self, plan: StepPlan) -> list[Request]:
        names = [admit.request_id.rpartition("/") for admit in plan.admits]
        return [self._siblings[name][int(index)] for name, _, index in names]

    def stats(self) -> EngineStats:
        found = self.scheduler.stats()
        names = set(found.__slots__) & set(EngineStats.__struct_fields__)
        return EngineStats(
            **{name: getattr(found, name) for name in names},
            set_back=self._set_back() if found.preemptions else 0,
            steps=self.telemetry.steps,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self.telemetry.generation_tokens,
            tiers=None if self._tiers is None else self._tiers.stats(),
            histograms=self.telemetry.histograms,
        )

    def _set_back(self) -> int:
        return sum(
            request.num_preemptions > 0 and request.status is not RequestStatus.RUNNING
            for request in self.scheduler.requests()
        )

    def shutdown(self) -> None:
        """Idempotent."""
        if not self.failed:
            for request_id in list(self._siblings):
                self.abort(request_id)
        if self._tiers is not None and not self.failed:
            self._save(self._tiers)
        if self._grammars is not None:
            self._grammars.shutdown()
        self.telemetry.close()
        self._executor.shutdown()

    def _save(self, tiers: OffloadFeature) -> None:
        """Leaves what was cached in files, as far as there is time."""
        deadline = time.monotonic() + _SAVE_SECONDS
        for move in (tiers.evict_all, tiers.save) if tiers.has_files else ():
            move()
            while self.scheduler.has_work() and time.monotonic() < deadline:
                self._step()
        self._tiers = None
