"""The order of requests: first come, first served, or by priority.

`Order` is all that a scheduler without tenants needs. `fair_share.FairShare` overrides it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from quire.config import SchedulerConfig
from quire.errors import RequestError
from quire.request import Request
from quire.scheduler.waiting import Entry, WaitingQueue, preemption_exhausted, sort_key

Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]


class QueuePart(NamedTuple):
    """A tenant's part of the queue.

    Attributes:
        requests: the tenant's waiting requests.
        tokens: the tokens of these requests.
        share: fraction of a full queue that the tenant may always have.
    """

    requests: int
    tokens: int
    share: float


class Order:
    """Decides which waiting request is next, which running request is preempted, and which requests
    may be in a step.

    Without tenants a step is open to all requests, first come, first served. `FairShare` reserves
    some steps for one tenant, and splits the token budget of the other steps between tenants.

    Attributes:
        key: returns a request's sort key; the smallest runs first.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.key = sort_key(config)
        self._budget = config.max_num_batched_tokens
        self._queue = WaitingQueue(self.key)

    # -- waiting requests ----------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def tokens(self) -> int:
        """Tokens of all waiting requests."""
        return self._queue.tokens

    def queue_part(self, request: Request) -> QueuePart:
        """Returns the part of the queue that belongs to the tenant of an arriving request."""
        return QueuePart(0, 0, 0.0)

    def check(self, request: Request) -> None:
        """Refuses a request that this order cannot place.

        Raises:
            RequestError: the request names a tenant.
        """
        if request.tenant:
            raise RequestError("this engine has no tenants", param="tenant")

    def arrive(self, request: Request) -> None:
        """Records a new request, before it is pushed."""

    def push(self, request: Request) -> None:
        self._queue.push(request)

    def next(self) -> Request | None:
        """Returns the request to start next; the same one until it is popped."""
        return self._queue.peek()

    def pop(self, request: Request) -> None:
        """Removes the request that `next` returned; the caller changes its status."""
        self._queue.pop(request)

    def forget(self, request: Request) -> None:
        """Removes a queued request whose status is no longer WAITING."""
        self._queue.forget(request)

    def finish(self, request: Request) -> None:
        """Records that a request has ended."""

    # -- running requests ----------------------------------------------------------------------

    def start(self, request: Request, computed: int) -> None:
        """Records that a request has a lane. `computed` of its tokens came from the cache."""

    def stop(self, request: Request) -> None:
        """Records that a request has lost its lane."""

    def victim(self, running: Sequence[Entry]) -> Request:
        """Returns the request to preempt when blocks run out.

        It is the last in order, except requests that were preempted too often. If all were, it is
        the last of all.

        Args:
            running: running requests, in policy order.
        """
        able = (r for _, _, r in reversed(running) if not preemption_exhausted(r))
        return next(able, running[-1][2])

    def victim_for(
        self, running: Sequence[Entry], has_free_lane: bool, blocked_head: Request | None
    ) -> Request | None:
        """Returns a running request that must stop for the next waiting one, or None.

        Args:
            running: running requests, in policy order.
            blocked_head: the request that found no blocks when it was last tried.
        """
        return None

    # -- who is in a step ----------------------------------------------------------------------

    def reserve_step(self, prompts: Iterable[Request], step_id: int) -> bool:
        """Reserves the next step for one tenant, until `open_step`. Returns whether it did.

        Args:
            prompts: requests whose prompts the step could compute, in order.
        """
        return False

    def open_step(self) -> None:
        """Ends the reservation of steps for one tenant."""

    def prompt_budget(self, step_id: int) -> int:
        """Returns the most prompt tokens that a step takes."""
        return self._budget

    def allowed_rows(self, requests: Sequence[Request]) -> Mask | None:
        """Returns which of these requests may be in the step, bool [n], or None for all."""
        return None

    def split_budget(
        self, prompts: Sequence[Request], budget: int, can_start: bool
    ) -> Sequence[int] | None:
        """Returns each prompt's part of a token budget, or None for first come, first served.

        Args:
            can_start: whether waiting requests could start in this step, too.
        """
        return None
