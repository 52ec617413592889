"""Executors: where plans run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.arrays import Int32
from quire.config import EngineConfig
from quire.executor import Capacity, OnProgress
from quire.plan import HeadInputs, StepPlan, StepResult
from quire.runner import Hook, ModelRunner


class InProcessExecutor:
    """One device, driven by the calling process."""

    def __init__(
        self,
        config: EngineConfig,
        progress: OnProgress | None = None,
        hooks: Sequence[Hook] = (),
    ) -> None:
        self._runner = ModelRunner(config, progress, hooks)

    def start(self) -> Capacity:
        return self._runner.start()

    def submit(self, plan: StepPlan) -> None:
        self._runner.submit(plan)

    def mask_room(self, step_id: int, rows: int) -> Int32:
        return self._runner.mask_room(step_id, rows)

    def submit_head(self, inputs: HeadInputs) -> None:
        self._runner.submit_head(inputs)

    def collect(self) -> StepResult:
        return self._runner.collect()

    def control(self, message: dict[str, Any]) -> Any:
        return self._runner.control(message)

    def shutdown(self) -> None:
        self._runner.shutdown()
