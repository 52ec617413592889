"""An engine's ranks, as a feature of its loop: their statistics, and their end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.config import EngineConfig
from quire.executor import Capacity, Executor
from quire.features.loop_feature import Failure, LoopFeature
from quire.scheduler import Feature

ASK = {"op": "ranks"}
WATCH = {"op": "rank_watch"}
"""The control messages that an executor of several ranks answers: with statistics; and with the
descriptor that becomes readable when a rank has ended, which is an error from then on."""


class Ranks(LoopFeature):
    """Asks the executor for statistics, and lets no loop sleep on whose ranks have ended."""

    def __init__(self, config: EngineConfig) -> None:
        self._executor: Executor | None = None

    def start(self, executor: Executor, capacity: Capacity) -> Feature | None:
        self._executor = executor
        return Feature()

    def fds(self) -> Sequence[int]:
        return () if self._executor is None else (self._executor.control(WATCH),)

    def poll(self, patience: float) -> tuple[Sequence[str], Sequence[Failure]]:
        if self._executor is not None:
            self._executor.control(WATCH)
        return (), ()

    def stats(self) -> dict[str, Any]:
        return {} if self._executor is None else {"ranks": self._executor.control(ASK)}
