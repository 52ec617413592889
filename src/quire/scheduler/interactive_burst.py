"""Short waits for guests: tenants who want little beside others who have the engine busy.

A guest's prompt waits for the step under way, then for its own. So its own has nobody else in it,
every other step at most; and for a while after one, steps without guests take few prompt tokens, as
another guest may come at any time. Neither costs anybody his share: a guest's tokens are charged as
everyone's, and who keeps coming is no guest any more.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.config import SchedulerConfig
from quire.request import Request
from quire.scheduler.tenants import FairQueue

_LITTLE = 4
"""Whoever has at most this part of the lanes of who has the most is a guest."""

_STEPS = 1000
"""For so many steps after a guest, another one is expected."""

_PART, _LEAST = 32, 64
"""For prompts meanwhile: this part of a step's token budget, or at least so many."""


class Courtesy:
    """Decides in steps, not seconds, so that the same requests are planned in the same way."""

    def __init__(self, config: SchedulerConfig, queue: FairQueue) -> None:
        self._queue = queue
        self._whole = config.max_num_batched_tokens
        self._part = min(self._whole, max(self._whole // _PART, _LEAST))
        if not config.enable_chunked_prefill:
            self._part = self._whole
        self._until = 0
        self._hosting = False

    def guest(self, prompts: Iterable[Request], step_id: int) -> str | None:
        """The tenant that has the step to itself, if one has. prompts: those that could be computed
        in it, in order."""
        if self._hosting or not self._queue.contested:
            self._hosting = False
            return None
        for request in prompts:
            if self._queue.lanes_beside(request) >= _LITTLE:
                self._hosting = True
                self._until = step_id + _STEPS
                return request.tenant
        return None

    def prompt_tokens(self, guest: str | None, step_id: int) -> int:
        """The most that a step takes."""
        return self._part if guest is None and step_id < self._until else self._whole
