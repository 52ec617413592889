"""The engine's loop: plans steps ahead, collects their results later, and reports them."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from quire.arrays import Int32
from quire.config import EngineConfig
from quire.engine.loop.telemetry import Telemetry, open_trace
from quire.errors import EngineDeadError, RequestError
from quire.executor import Executor
from quire.features.call import CallType, NewsType, RequestField
from quire.features.loop_feature import Failure, LoopFeature, RequestedFeature
from quire.plan import StepPlan
from quire.request import FinishReason, Request, RequestOptions, RequestStatus
from quire.sampling_params import SamplingParams
from quire.scheduler import Feature, Order, Scheduler, StepProgress

if TYPE_CHECKING:
    from quire.engine.loop.stats import EngineStats

_GOLDEN = 0x9E3779B97F4A7C15
"""An odd constant near 2**64 / golden ratio: its multiples spread over all 64-bit words."""

_IDLE = 5e-3
"""Seconds to wait for features when there is nothing else to do."""

_CLOSE_SECONDS = 3.0
"""Seconds for which features may use the engine when it shuts down."""


class EngineCore:
    """Owns the scheduler and an executor. Single-threaded: its owner calls `add`, `abort` and
    `step` in turn.

    A request with `n` > 1 becomes `n` siblings, which share the prompt's blocks.

    An error in a step leaves the scheduler and the device in different states. `failed` is then
    set for good, and only `shutdown` and `stats` may be called.

    Args:
        features: features of the scheduler. It calls them in this order, before those that
            loop_features return.
        order: see `Scheduler`.
        requested: features that requests turn on.
        scheduler: the scheduler's class.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        features: Sequence[Feature] = (),
        loop_features: Sequence[LoopFeature] = (),
        order: Order | None = None,
        requested: Sequence[RequestedFeature] = (),
        scheduler: type[Scheduler] = Scheduler,
    ) -> None:
        self.config = config
        self._executor = executor
        self.capacity = executor.start()
        features, self._loop_features = list(features), []
        self._requested = list(requested)
        for loop_feature in loop_features:
            feature = loop_feature.start(executor, self.capacity)
            if feature is not None:
                features.append(feature)
                self._loop_features.append(loop_feature)
        self.scheduler = scheduler(config.scheduler, self.capacity, features, order)
        self._siblings: dict[str, list[Request]] = {}
        self._seeds = 0
        self._prompt_tokens = 0
        self.telemetry = Telemetry(open_trace(config, self.scheduler))
        self._failures: list[Failure] = []
        self.failed = False

    def add(
        self,
        request_id: str,
        prompt: Int32,
        params: SamplingParams,
        *,
        max_total: int,
        **options: Unpack[RequestOptions],
    ) -> list[Request]:
        """Queues a validated request; returns its `n` completions in order. options: see `Request`.

        Raises:
            OverloadedError: the queue is full.
            RequestError: the request can never run, or a feature refused it. Nothing is queued.
            EngineDeadError: a step has failed.
        """
        self._check_alive()
        params = self._with_mode(params)
        self._turn_on(params, options)
        if options.get("priority") and self.config.scheduler.policy != "priority":
            raise RequestError(
                f"'priority' {options['priority']} needs --scheduling-policy priority; this "
                f"engine's is {self.config.scheduler.policy}",
                param="priority",
            )
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
                    seed=seed,
                    sample_index=index,
                    leader=requests[0] if requests else None,
                    **options,
                )
                self.scheduler.add(request)
                requests.append(request)
        except Exception:
            for request in requests:
                self.scheduler.abort(request.request_id)
            raise
        self._siblings[request_id] = requests
        self._prompt_tokens += len(prompt)
        return requests

    def call(self, call: CallType[Any, Any], request: Any) -> Any:
        """Returns the answer of the feature that takes a call: see `LoopFeature.calls`.

        Raises:
            RequestError: no feature takes the call, or the feature refuses it.
        """
        for feature in self._loop_features:
            answer = feature.calls().get(call)
            if answer is not None:
                return answer(self, request)
        for entry in [each for each in self._requested if each.takes(call)]:
            self._open(entry)
            return self.call(call, request)
        raise call.refuse()

    def give(self, request_id: str, field: RequestField[Any], value: Any) -> None:
        """Gives a queued request's field to the feature that takes it.

        Raises:
            RequestError: no feature takes the field, or the feature refuses it. The request is
                aborted.
        """
        try:
            for feature in self._loop_features:
                take = feature.fields().get(field)
                if take is not None:
                    return take(request_id, value)
            if (refusal := field.refuse(value)) is not None:
                raise refusal
        except Exception:
            self.abort(request_id)
            raise

    def takes(self, call: CallType[Any, Any]) -> bool:
        """Whether a feature takes a call."""
        return any(call in feature.calls() for feature in self._loop_features)

    def news(self) -> dict[NewsType[Any], Any]:
        """Returns the news that features send to all clients."""
        return {n: v for feature in self._loop_features for n, v in feature.news().items()}

    def load(self) -> dict[str, float]:
        """Returns what features add to the engine's load; see `LoopFeature.load`."""
        return {n: v for feature in self._loop_features for n, v in feature.load().items()}

    def _turn_on(self, params: SamplingParams, options: RequestOptions) -> None:
        """Turns on the features that a request asks for, if they are still off."""
        for entry in [each for each in self._requested if each.requested(params, options)]:
            self._open(entry)

    def _open(self, entry: RequestedFeature) -> None:
        """Turns on a feature."""
        self._requested.remove(entry)
        loop_feature = entry.open()
        feature = loop_feature.start(self._executor, self.capacity)
        if feature is not None:
            self.scheduler.add_feature(feature)
            self._loop_features.append(loop_feature)

    def _with_mode(self, params: SamplingParams) -> SamplingParams:
        """Returns parameters with the engine's `logprobs_mode`, if they have none of their own."""
        mode = self.config.args.logprobs_mode
        if params.logprobs is None or params.logprobs_mode != "auto" or mode == "raw_logprobs":
            return params
        return msgspec.structs.replace(params, logprobs_mode=mode)

    def _check_alive(self) -> None:
        if self.failed:
            raise EngineDeadError("the engine failed in an earlier step; start a new one")

    def _next_seed(self) -> int:
        """Returns the seed for a request without one. It follows from the engine's seed and the
        order of arrival."""
        self._seeds += 1
        word = (self.config.args.seed + 1 + self._seeds * _GOLDEN) & (2**64 - 1)
        return word - 2**64 if word >= 2**63 else word

    def abort(self, request_id: str, index: int | None = None) -> list[Request]:
        """Ends a request, or one of its completions, at once. Returns the completions that this
        ended. An unknown or ended request is ignored."""
        aborted = []
        for request in self._siblings.get(request_id, []):
            wanted = index is None or request.sample_index == index
            if wanted and self.scheduler.abort(request.request_id) is not None:
                aborted.append(request)
        self._forget_ended(request_id)
        return aborted

    def _forget_ended(self, request_id: str) -> None:
        if all(request.finished for request in self._siblings.get(request_id, ())):
            self._siblings.pop(request_id, None)

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def step(self) -> StepProgress | None:
        """Launches the steps that can be launched, then reads the oldest one in flight. Returns
        None if there was nothing to read. An exception ends the engine."""
        self._check_alive()
        try:
            return self._step()
        except BaseException:
            self.failed = True
            raise

    def _step(self) -> StepProgress | None:
        scheduler, executor, features = self.scheduler, self._executor, self._loop_features
        self._poll(0.0)
        while scheduler.num_in_flight < self.config.scheduler.steps_in_flight:
            begun = time.monotonic()
            plan = scheduler.plan()
            if plan is None:
                break
            planned = time.monotonic()
            for feature in features:
                feature.before_submit()
            executor.submit(plan)
            self.telemetry.launched(plan, self._admitted(plan), begun, planned)
        if not scheduler.num_in_flight:
            if self.waits:
                self._wait_for_news()
            return None
        begun = time.monotonic()
        result = executor.collect()
        collected = time.monotonic()
        self._poll(0.0)  # a request whose masks have failed does not get the step's token
        progress = scheduler.update(result)
        for feature in features:
            feature.after_update(progress.step_id)
        self.telemetry.read(progress, result.gpu_us, begun, collected)
        for place in progress.finished:
            self._forget_ended(progress.requests[place].request_id.rpartition("/")[0])
        return progress

    def _poll(self, patience: float) -> None:
        """Wakes the requests that features have made ready, and ends those that failed."""
        for feature in self._loop_features:
            woken, failed = feature.poll(patience if feature.waits else 0.0)
            for request_id in woken:
                self.scheduler.wake(request_id)
            for request, error in failed:
                reason = FinishReason.ABORT if error is None else FinishReason.ERROR
                if self.scheduler.abort(request.request_id, reason) is not None:
                    self._failures.append((request, error))
                    self._forget_ended(request.request_id.rpartition("/")[0])

    def _wait_for_news(self) -> None:
        poll, fds = select.poll(), self.fds
        for fd in fds:
            poll.register(fd, select.POLLIN)
        if fds:
            poll.poll(1000 * _IDLE)
        self._poll(0.0 if fds else _IDLE)

    @property
    def fds(self) -> list[int]:
        """Descriptors that become readable when features have news."""
        return [fd for feature in self._loop_features for fd in feature.fds()]

    def take_failures(self) -> list[Failure]:
        """Returns the requests that have failed, with their errors. Each is returned once."""
        failures, self._failures = self._failures, []
        return failures

    @property
    def waits(self) -> bool:
        """Whether requests are parked until a feature has news. Then a step may do nothing."""
        return any(feature.waits for feature in self._loop_features)

    def _admitted(self, plan: StepPlan) -> list[Request]:
        names = [admit.request_id.rpartition("/") for admit in plan.admits]
        return [self._siblings[name][int(index)] for name, _, index in names]

    def stats(self) -> EngineStats:
        # Imported here because few runs ask for statistics.
        from quire.engine.loop.stats import EngineStats

        found = self.scheduler.stats()
        names = set(found.__slots__) & set(EngineStats.__struct_fields__)
        fields = [field for each in self._loop_features for field in each.stats().items()]
        return EngineStats(
            **{name: getattr(found, name) for name in names},
            set_back=self._set_back() if found.preemptions else 0,
            steps=self.telemetry.steps,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self.telemetry.generation_tokens,
            broken_logits=self.telemetry.broken_logits,
            histograms=self.telemetry.histograms,
            **dict(fields),
        )

    def _set_back(self) -> int:
        return sum(
            request.num_preemptions > 0 and request.status is not RequestStatus.RUNNING
            for request in self.scheduler.requests()
        )

    def shutdown(self) -> None:
        """Ends all requests and releases the device. Idempotent."""
        if not self.failed:
            for request_id in list(self._siblings):
                self.abort(request_id)
        deadline = time.monotonic() + _CLOSE_SECONDS

        def drain() -> None:
            while self.scheduler.has_work() and time.monotonic() < deadline:
                self._step()

        closing, self._loop_features = self._loop_features, []
        for feature in closing:
            feature.close(None if self.failed else drain)
        self.telemetry.close()
        self._executor.shutdown()
