"""All features of a scheduler. Each method is called only for features that override it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quire.arrays import Int32
from quire.cache import BlockManager
from quire.plan import StepPlan, StepResult
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.scheduler.feature import Feature, PlanBuilder
from quire.scheduler.lanes import Launched


class FeatureSet:
    """Calls the methods of `Feature` for all features at once.

    ready, fetch, reusable, verified: bound methods, for the parts of the scheduler that call them
        themselves.
    looks_ahead: the features that propose drafts.
    """

    def __init__(self, features: Sequence[Feature]) -> None:
        self._calls: dict[str, list[Callable[..., Any]]] = {
            name: [] for name in vars(Feature) if not name.startswith("_")
        }
        """By method, the bound methods of the features that override it."""
        self.ready = self._calls["ready"]
        self.fetch = self._calls["fetch"]
        self.reusable = self._calls["reusable"]
        self.verified = self._calls["verified"]
        self.looks_ahead: list[Feature] = []
        for feature in features:
            self.add(feature)

    def add(self, feature: Feature) -> None:
        for name, calls in self._calls.items():
            if getattr(type(feature), name) is not getattr(Feature, name):
                calls.append(getattr(feature, name))
        if type(feature).lookahead is not Feature.lookahead:
            self.looks_ahead.append(feature)

    def attach(self, blocks: BlockManager, wake: Callable[[str], None]) -> None:
        for attach in self._calls["attach"]:
            attach(blocks, wake)
        blocks.on_evict = self._calls["evict"]

    def admit(self, request: Request) -> None:
        """Raises the first refusal, when those who have taken the request in know its end."""
        try:
            for admit in self._calls["admit"]:
                if refusal := admit(request):
                    raise refusal
        except Exception:  # also of a feature that fails at what the request holds
            self.finish(request)
            raise

    def device_params(self, request: Request) -> SamplingParams:
        params = request.params
        for device_params in self._calls["device_params"]:
            params = device_params(request, params)
        return params

    def lookahead(self, lanes: Int32, room: Int32) -> Int32:
        """Returns the most drafts that any feature proposes for each row, at most `room`."""
        counts = np.zeros_like(lanes)
        for feature in self.looks_ahead:
            counts = np.maximum(counts, feature.lookahead(lanes, room))
        return np.minimum(counts, room)

    def preempt(self, request: Request) -> bool:
        answers = [preempt(request) for preempt in self._calls["preempt"]]  # all are called
        return any(answers)

    def release(self, request: Request) -> bool:
        answers = [release(request) for release in self._calls["release"]]
        return any(answers)

    def finish(self, request: Request) -> None:
        for finish in self._calls["finish"]:
            finish(request)

    def pending(self, idle: bool) -> bool:
        return any(pending(idle) for pending in self._calls["pending"])

    def forget(self) -> None:
        for forget in self._calls["forget"]:
            forget()

    def plan(self, plan: StepPlan, requests: list[Request]) -> None:
        if self._calls["plan"]:
            builder = PlanBuilder(plan, requests)
            for add in self._calls["plan"]:
                add(builder)

    def transferred(self, result: StepResult) -> None:
        if result.finished_transfers or result.failed_transfers:
            for transferred in self._calls["transferred"]:
                transferred(result.finished_transfers, result.failed_transfers)

    def cut(self, step: Launched, tokens: Int32, n: Int32) -> list[int]:
        """Lets features shorten the number of tokens that rows keep, in `n`. Returns the rows that
        were shortened."""
        results = self._calls["result"]
        if not results:
            return []
        cut = []
        for i, (request, count) in enumerate(zip(step.requests, n.tolist(), strict=True)):
            kept = min([count, *(keep(request, tokens[i, :count]) for keep in results)])
            if count and kept < count:
                n[i] = max(kept, 0)
                cut.append(i)
        return cut
