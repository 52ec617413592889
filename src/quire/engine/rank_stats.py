"""The statistics of an engine's ranks, as a feature of its loop."""

from __future__ import annotations

from typing import Any

from quire.config import EngineConfig
from quire.executor import Capacity, Executor
from quire.loop_feature import LoopFeature
from quire.scheduler import Feature

ASK = {"op": "ranks"}
"""The control message that an executor of several ranks answers."""


class RankStatistics(LoopFeature):
    """Asks the executor whenever somebody asks for statistics."""

    def __init__(self, config: EngineConfig) -> None:
        self._executor: Executor | None = None

    def start(self, executor: Executor, capacity: Capacity) -> Feature | None:
        self._executor = executor
        return Feature()

    def stats(self) -> dict[str, Any]:
        return {} if self._executor is None else {"ranks": self._executor.control(ASK)}
