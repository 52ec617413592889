"""The runner's part: layers with redundant experts, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.config import EngineConfig
from quire.executor import WorkerCall
from quire.features.expert_balance.balanced_experts import BalancedExperts
from quire.features.expert_balance.feature import ENTRY, EXPERT_STATS
from quire.features.expert_balance.stats import ExpertStats
from quire.layers.experts import Experts
from quire.models import Decoder
from quire.runner.hooks import HostHook
from quire.runner.readback import Step


class BalanceHook(HostHook):
    """Rearranges experts before the body of a plan with the entry `rearrange_experts`."""

    entries = frozenset({ENTRY})

    def __init__(self, config: EngineConfig) -> None:
        self._redundant = config.args.redundant_experts
        self._layers: list[BalancedExperts] = []

    def attach(self, model: Decoder) -> None:
        self._layers = [
            BalancedExperts(module, self._redundant)
            for module in model.modules()
            if isinstance(module, Experts)
        ]

    def begin(self, step: Step) -> None:
        if ENTRY in step.plan.writes:
            for layer in self._layers:
                layer.rearrange()

    def calls(self) -> Mapping[WorkerCall[Any, Any], Callable[[Any], Any]]:
        return {EXPERT_STATS: lambda _: self._stats()}

    def _stats(self) -> ExpertStats:
        each = [layer.stats for layer in self._layers]
        return ExpertStats(
            most_work=sum(stats.most_work for stats in each),
            mean_work=sum(stats.mean_work for stats in each),
            moves=sum(stats.moves for stats in each),
        )
