"""The engine's part: it decides when experts are rearranged."""

from __future__ import annotations

from typing import Any

from quire.arrays import int32
from quire.config import EngineConfig
from quire.executor import Capacity, Executor, WorkerCall
from quire.features.expert_balance.stats import ExpertStats
from quire.features.loop_feature import LoopFeature
from quire.scheduler import Feature, PlanBuilder

ENTRY = "rearrange_experts"
"""Entry of `StepPlan.writes`: experts are rearranged before this plan's body."""
EXPERT_STATS: WorkerCall[None, ExpertStats] = WorkerCall("expert_balance.stats")
"""Returns the statistics of the first rank."""
FIRST_STEPS, STEPS = 256, 4096
"""Steps before the first rearrangement of experts, and between two rearrangements."""


class StepCount(Feature):
    """Counts steps, so that every rank rearranges experts before the same step."""

    def __init__(self) -> None:
        self._left = FIRST_STEPS

    def plan(self, builder: PlanBuilder) -> None:
        self._left -= 1
        if not self._left:
            self._left = STEPS
            builder.write(ENTRY, int32([]), int32([]))


class Balance(LoopFeature):
    """Starts the count, and asks the first rank for statistics."""

    def __init__(self, config: EngineConfig) -> None:
        self._executor: Executor | None = None

    def start(self, executor: Executor, capacity: Capacity) -> Feature | None:
        self._executor = executor
        return StepCount()

    def stats(self) -> dict[str, Any]:
        return (
            {} if self._executor is None else {"experts": self._executor.call(EXPERT_STATS, None)}
        )
