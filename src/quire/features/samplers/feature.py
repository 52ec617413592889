"""The loop's side: it refuses requests whose samplers cannot run."""

from __future__ import annotations

from collections.abc import Sequence

from quire.config import EngineConfig
from quire.errors import RequestError
from quire.executor import Capacity, Executor
from quire.features.loop_feature import LoopFeature
from quire.sampling_params import SamplingParams
from quire.scheduler import Feature


class SamplersFeature(Feature, LoopFeature):
    """Refuses the caller's functions if the engine has other ranks, which do not have them."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def start(self, executor: Executor, capacity: Capacity) -> Feature | None:
        return self

    def check(self, params: Sequence[SamplingParams]) -> None:
        if self._ranks > 1 and any(each.logits_processors for each in params):
            raise RequestError(
                "logits_processors need tensor_parallel_size=1, because the functions exist in "
                f"only one process; this engine has {self._ranks} ranks",
                "logits_processors",
            )


def open_samplers(config: EngineConfig) -> SamplersFeature:
    """Returns the feature for an engine."""
    return SamplersFeature(config.args.tensor_parallel_size)
