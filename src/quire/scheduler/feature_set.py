"""The scheduler's questions to its features, each put to those alone that have something to say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from quire.arrays import Int32
from quire.cache import BlockManager
from quire.errors import RequestError
from quire.plan import StepPlan, StepResult
from quire.request import Request
from quire.scheduler.feature import Feature, PlanBuilder
from quire.scheduler.lanes import Launched


class FeatureSet:
    """The methods of `Feature`, of all features at once. ready, fetch, reusable, lookahead: for the
    parts of the scheduler that ask these themselves."""

    def __init__(self, features: Sequence[Feature]) -> None:
        self._features = features
        self.ready = self._overridden("ready")
        self.fetch = self._overridden("fetch")
        self.reusable = self._overridden("reusable")
        self.lookahead = self._overridden("lookahead")
        self._admit = self._overridden("admit")
        self._plan = self._overridden("plan")
        self._result = self._overridden("result")
        self._release = self._overridden("release")
        self._transferred = self._overridden("transferred")
        self._pending = self._overridden("pending")
        self._preempt = self._overridden("preempt")
        self._forget = self._overridden("forget")

    def _overridden(self, name: str) -> list[Callable[..., Any]]:
        """The bound methods `name` of those features that define one of their own."""
        base = getattr(Feature, name)
        return [getattr(f, name) for f in self._features if getattr(type(f), name) is not base]

    def attach(self, blocks: BlockManager, wake: Callable[[str], None]) -> None:
        for attach in self._overridden("attach"):
            attach(blocks, wake)
        blocks.on_evict = self._overridden("evict")

    def admit(self, request: Request) -> None:
        """Raises the first refusal."""
        for admit in self._admit:
            refusal: RequestError | None = admit(request)
            if refusal is not None:
                raise refusal

    def preempt(self, request: Request) -> bool:
        answers = [preempt(request) for preempt in self._preempt]  # all are told
        return any(answers)

    def release(self, request: Request) -> bool:
        answers = [release(request) for release in self._release]
        return any(answers)

    def pending(self, idle: bool) -> bool:
        return any(pending(idle) for pending in self._pending)

    def forget(self) -> None:
        for forget in self._forget:
            forget()

    def plan(self, plan: StepPlan, requests: list[Request]) -> None:
        if self._plan:
            builder = PlanBuilder(plan, requests)
            for add in self._plan:
                add(builder)

    def transferred(self, result: StepResult) -> None:
        if result.finished_transfers or result.failed_transfers:
            for transferred in self._transferred:
                transferred(result.finished_transfers, result.failed_transfers)

    def cut(self, step: Launched, tokens: Int32, n: Int32) -> list[int]:
        """Lets features shorten what rows keep, in `n`. Returns the rows that were."""
        if not self._result:
            return []
        cut = []
        for i, (request, count) in enumerate(zip(step.requests, n.tolist(), strict=True)):
            kept = min([count, *(keep(request, tokens[i, :count]) for keep in self._result)])
            if count and kept < count:
                n[i] = max(kept, 0)
                cut.append(i)
        return cut
