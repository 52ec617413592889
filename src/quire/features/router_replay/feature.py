"""The scheduler's part: it refuses requests and prefix hits."""

from __future__ import annotations

from quire.config import EngineConfig
from quire.errors import RequestError
from quire.executor import Capacity, Executor
from quire.features.loop_feature import LoopFeature
from quire.features.router_replay.args import RouterReplayArgs
from quire.request import Request
from quire.scheduler import Feature


class RouterReplay(Feature, LoopFeature):
    """Makes requests compute every position whose experts they return."""

    def __init__(self, config: EngineConfig) -> None:
        self._enabled = RouterReplayArgs.of(config.args).enable_return_routed_experts
        self._computed: dict[str, tuple[str, int]] = {}
        """By id of a preempted request: the weights' id, and the number of computed positions."""

    def start(self, executor: Executor, capacity: Capacity) -> Feature | None:
        return self

    def admit(self, request: Request) -> RequestError | None:
        if not request.params.return_routed_experts:
            return None
        if not self._enabled:
            return RequestError(
                "return_routed_experts needs an engine with --enable-return-routed-experts",
                "return_routed_experts",
            )
        if request.pooling is not None:
            return RequestError(
                "return_routed_experts is not available for embeddings", "return_routed_experts"
            )
        return None

    def reusable(self, request: Request, n: int) -> int:
        """Positions from the cache have no experts, unless this request computed them before it was
        preempted. Siblings get the experts of their prompt from the first of them."""
        if not request.params.return_routed_experts or self._has_prompt_of(request.leader):
            return n
        weights, computed = self._computed.get(request.request_id, ("", 0))
        return min(n, computed) if weights == request.weights else 0

    def _has_prompt_of(self, leader: Request | None) -> bool:
        return leader is not None and (leader.generating or leader.num_output_tokens > 0)

    def preempt(self, request: Request) -> bool:
        if request.params.return_routed_experts:
            self._computed[request.request_id] = request.weights, request.computed
        return False

    def finish(self, request: Request) -> None:
        self._computed.pop(request.request_id, None)
