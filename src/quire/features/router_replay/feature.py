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
        if not request.params.return_routed_experts:
            return n
        if not request.num_preemptions and self._has_prompt(request.leader, request.weights):
            return n
        return min(n, self._computed_with(request, request.weights))

    def _has_prompt(self, leader: Request | None, weights: str) -> bool:
        """Returns whether the first sibling has the experts of the prompt under these weights."""
        if leader is None or leader.weights != weights:
            return False
        if leader.generating or leader.finished:
            return leader.generating or leader.num_output_tokens > 0
        return self._computed_with(leader, weights) >= leader.prompt_len

    def _computed_with(self, request: Request, weights: str) -> int:
        """Returns how many positions a preempted request has computed with these weights."""
        used, computed = self._computed.get(request.request_id, ("", 0))
        return computed if used == weights else 0

    def preempt(self, request: Request) -> bool:
        if request.params.return_routed_experts:
            self._computed[request.request_id] = request.weights, request.computed
        return False

    def finish(self, request: Request) -> None:
        self._computed.pop(request.request_id, None)
