"""Short waits for interactive tenants: those with little demand beside others that fill the engine.

An interactive tenant's prompt waits for the step in flight, then for its own step. So its own step,
at most every other one, holds no other tenant; and for a while after one, other steps take few
prompt tokens, as another interactive prompt may come at any time. This costs the others no part of
their share: its tokens are charged like all others, and with steady demand it is not interactive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from quire.config import SchedulerConfig
from quire.request import Request

_LANE_RATIO = 4
"""A tenant is interactive if another has at least this many lanes for each of its own."""

_STEPS = 1000
"""Steps for which another interactive prompt is expected after one."""

_PART, _LEAST = 32, 64
"""Prompts meanwhile get this part of a step's token budget, or at least so many tokens."""


class InteractiveBurst:
    """Decides in steps, not seconds, so that the same requests are planned in the same way."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._whole = config.max_num_batched_tokens
        self._part = min(self._whole, max(self._whole // _PART, _LEAST))
        if not config.enable_chunked_prefill:
            self._part = self._whole
        self._until = 0
        self._last_exclusive = False

    def choose(
        self, prompts: Iterable[Request], lanes_beside: Callable[[Request], float], step_id: int
    ) -> str | None:
        """Returns the tenant that has the step to itself, or None. prompts: requests that could be
        computed in it, in order."""
        if self._last_exclusive:
            self._last_exclusive = False
            return None
        for request in prompts:
            if lanes_beside(request) >= _LANE_RATIO:
                self._last_exclusive = True
                self._until = step_id + _STEPS
                return request.tenant
        return None

    def skip(self) -> None:
        """Notes a step that no tenants compete for."""
        self._last_exclusive = False

    def prompt_budget(self, exclusive: bool, step_id: int) -> int:
        """Returns the most prompt tokens of a step."""
        return self._part if not exclusive and step_id < self._until else self._whole
