"""Fair sharing between tenants: deficit round-robin over their queues."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from quire.config import SchedulerConfig
from quire.request import Request
from quire.scheduler.order import Mask, Order, QueuePart
from quire.scheduler.waiting import Entry, SortKey, WaitingQueue, preemption_exhausted

__all__ = ["FairShare"]


# One tenant's queue and credit, and the division of a budget between tenants.

_GRANT = 256
"""Tokens that a tenant of share 1 is granted in a round: about one request. With fewer, finding the
next tenant takes more rounds; with more, tenants wait longer for their turn."""


class Tenant:
    """A tenant's state.

    Attributes:
        queue: the tenant's waiting requests.
        queued: whether the tenant takes turns.
        share: its weight against other tenants, > 0.
        requests: number of its unfinished requests.
        lanes: number of its lanes.
        credit: tokens it may still start; negative if it owes some.
        round: the last round in which it was granted credit.
    """

    def __init__(self, name: str, key: Callable[[Request], SortKey], round: int) -> None:
        self.name = name
        self.queue = WaitingQueue(key)
        self.queued = False
        self.share = 1.0
        self.requests = self.lanes = 0
        self.credit = 0.0
        self.round = round

    def grant(self, round: int) -> None:
        """Adds the credit of all rounds since the last grant, at most the credit of one round."""
        if round > self.round:
            most = _GRANT * self.share
            self.credit = min(self.credit + (round - self.round) * most, most)
            self.round = round

    @property
    def rounds_in_debt(self) -> int:
        """Rounds until the tenant has credit again."""
        return math.floor(-self.credit / (_GRANT * self.share)) + 1


def fair_parts(wants: Mapping[str, tuple[int, float]], budget: int) -> dict[str, int]:
    """Divides a budget of tokens by weight, max-min fair.

    No tenant gets more than it wants, and the rest goes to the others. Each gets at least one
    token, even if that exceeds the budget.

    Args:
        wants: (tokens, share) by tenant.
    """
    parts = {}
    total = sum(share for _, share in wants.values())
    for name in sorted(wants, key=lambda name: wants[name][0] / wants[name][1]):
        want, share = wants[name]
        parts[name] = part = max(1, min(want, int(budget * share / total)))
        budget = max(budget - part, 0)
        total -= share
    return parts


# Interactive tenants, who hold few lanes while another tenant fills the engine, wait less.

_LANE_RATIO = 4
"""A tenant is interactive if another has at least this many lanes for each of its own."""

_STEPS = 1000
"""For this many steps after an interactive prompt, another one is expected."""

_PART, _LEAST = 32, 64
"""While an interactive prompt is expected, prompts get 1 / _PART of a step's token budget, but at
least _LEAST tokens."""


class InteractiveBurst:
    """Reserves steps for the prompts of interactive tenants.

    It counts steps rather than seconds, so that the same requests always give the same plans.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._whole = config.max_num_batched_tokens
        self._part = min(self._whole, max(self._whole // _PART, _LEAST))
        if not config.enable_chunked_prefill:
            self._part = self._whole
        self._until = 0
        self._last_exclusive = False

    def choose(
        self, prompts: Iterable[Request], lane_ratio: Callable[[Request], float], step_id: int
    ) -> str | None:
        """Returns the tenant that has the step to itself, or None.

        Args:
            prompts: requests that could be computed in the step, in order.
            lane_ratio: `FairShare.lane_ratio`.
        """
        if self._last_exclusive:
            self._last_exclusive = False
            return None
        for request in prompts:
            if lane_ratio(request) >= _LANE_RATIO:
                self._last_exclusive = True
                self._until = step_id + _STEPS
                return request.tenant
        return None

    def skip(self) -> None:
        """Records a step with requests of one tenant only."""
        self._last_exclusive = False

    def prompt_budget(self, exclusive: bool, step_id: int) -> int:
        """Returns the most prompt tokens of a step."""
        return self._part if not exclusive and step_id < self._until else self._whole


# Fair sharing between tenants: deficit round-robin over their queues.


class FairShare(Order):
    """Orders the requests of all tenants, and divides lanes, blocks and steps between them.

    Attributes:
        exclusive: the only tenant in the step that is being planned, or None.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._tenants: dict[str, Tenant] = {}
        self._turns: deque[Tenant] = deque()
        self._round = 1
        self._present: dict[str, Tenant] = {}
        self._count = self._tokens = 0
        self._burst = InteractiveBurst(config)
        self.exclusive: str | None = None

    @property
    def contested(self) -> bool:
        """Whether more than one tenant has unfinished requests."""
        return len(self._present) > 1

    # -- waiting requests ----------------------------------------------------------------------

    def __len__(self) -> int:
        return self._count

    @property
    def tokens(self) -> int:
        return self._tokens

    def queue_part(self, request: Request) -> QueuePart:
        tenant = self._present.get(request.tenant)
        others = sum(t.share for name, t in self._present.items() if name != request.tenant)
        share = request.share / (request.share + others)
        if tenant is None:
            return QueuePart(0, 0, share)
        return QueuePart(tenant.requests - tenant.lanes, tenant.queue.tokens, share)

    def check(self, request: Request) -> None:
        """Accepts every tenant."""

    def arrive(self, request: Request) -> None:
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            tenant = Tenant(request.tenant, self.key, self._round - 1)
            self._tenants[request.tenant] = tenant
        tenant.share = request.share
        tenant.requests += 1
        self._present[request.tenant] = tenant

    def finish(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        tenant.requests -= 1
        if tenant.requests == 0:
            del self._present[request.tenant]

    def push(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        if not tenant.queued:
            tenant.queued = True
            tenant.grant(self._round)
            if tenant.credit > 0:
                self._turns.appendleft(tenant)
            else:
                self._turns.append(tenant)
        tenant.queue.push(request)
        self._add(1, request.known)

    def next(self) -> Request | None:
        """Returns the request to start next, or None in a step that is reserved for another tenant.

        The answer stays the same until the request is popped or another tenant arrives.
        """
        request = self._peek()
        if request is None or self.exclusive in (None, request.tenant):
            return request
        return None

    def _peek(self) -> Request | None:
        while self._turns:
            for _ in range(len(self._turns)):
                tenant = self._turns[0]
                request = tenant.queue.peek()
                if request is None:
                    tenant.queued = False
                    self._turns.popleft()
                    continue
                tenant.grant(self._round)
                if tenant.credit > 0:
                    return request
                self._turns.rotate(-1)
            if self._turns:
                self._round += min(tenant.rounds_in_debt for tenant in self._turns)
        return None

    def pop(self, request: Request) -> None:
        self._tenants[request.tenant].queue.pop(request)
        self._add(-1, -request.known)

    def forget(self, request: Request) -> None:
        self._tenants[request.tenant].queue.forget(request)
        self._add(-1, -request.known)

    def _add(self, count: int, tokens: int) -> None:
        self._count += count
        self._tokens += tokens

    # -- running requests ----------------------------------------------------------------------

    def start(self, request: Request, computed: int) -> None:
        self._tenants[request.tenant].lanes += 1
        self._charge(request, computed)

    def stop(self, request: Request) -> None:
        self._tenants[request.tenant].lanes -= 1
        self._charge(request, 0)

    def _charge(self, request: Request, free: int) -> None:
        """Charges tokens that were not charged yet, so that a preemption costs no credit."""
        tokens = request.known - max(request.charged, free)
        request.charged = request.known
        self._tenants[request.tenant].credit -= max(tokens, 0)

    def victim(self, running: Sequence[Entry]) -> Request:
        """Returns the request to preempt when blocks run out.

        It is the last request of the tenant that holds the most tokens for its share. A tenant's
        only request is spared, so that every request can end.
        """
        if self.contested:
            greediest = _latest_of_greediest(running, _known_tokens, 0.0)
            if greediest is not None:
                return greediest
        return super().victim(running)

    def victim_for(
        self, running: Sequence[Entry], has_free_lane: bool, blocked_head: Request | None
    ) -> Request | None:
        """Returns a running request that must stop for the next waiting one, or None.

        A request must stop if the waiting request finds no free lane or too few blocks, and another
        tenant holds more than twice as much for its share as the request's tenant would.
        """
        if not self.contested:
            return None
        request = self._peek()
        if request is None or (has_free_lane and request is not blocked_head):
            return None
        measure = _known_tokens if has_free_lane else _one_lane
        held = sum(measure(r) for _, _, r in running if r.tenant == request.tenant)
        least = 2.0 * (held + measure(request)) / request.share
        return _latest_of_greediest(running, measure, least)

    # -- who is in a step ----------------------------------------------------------------------

    def reserve_step(self, prompts: Iterable[Request], step_id: int) -> bool:
        """Reserves the next step for an interactive tenant, if one waits (`InteractiveBurst`)."""
        if self.contested:
            self.exclusive = self._burst.choose(prompts, self.lane_ratio, step_id)
        else:
            self._burst.skip()
        return self.exclusive is not None

    def open_step(self) -> None:
        self.exclusive = None

    def prompt_budget(self, step_id: int) -> int:
        return self._burst.prompt_budget(self.exclusive is not None, step_id)

    def allowed_rows(self, requests: Sequence[Request]) -> Mask | None:
        if self.exclusive is None:
            return None
        return np.array([request.tenant == self.exclusive for request in requests], dtype=bool)

    def split_budget(
        self, prompts: Sequence[Request], budget: int, can_start: bool
    ) -> Sequence[int] | None:
        """Divides the budget between tenants, max-min fair, then between a tenant's prompts."""
        if self.exclusive is not None:
            parts = {self.exclusive: budget}
        else:
            wants = self._queued_tokens() if can_start and self.contested else {}
            for request in prompts:
                tokens, _ = wants.get(request.tenant, (0, 0.0))
                wants[request.tenant] = tokens + request.known - request.planned, request.share
            if len(wants) < 2:
                return None
            parts = fair_parts(wants, budget)
        taken = []
        for request in prompts:
            part = parts.get(request.tenant, 0)
            taken.append(min(part, request.known - request.planned))
            parts[request.tenant] = part - taken[-1]
        return taken

    def _queued_tokens(self) -> dict[str, tuple[int, float]]:
        """Returns (tokens, share) of each tenant with queued requests."""
        return {t.name: (t.queue.tokens, t.share) for t in self._turns if t.queue.tokens}

    def lane_ratio(self, request: Request) -> float:
        """Returns how many lanes the busiest tenant has for each lane of this request's tenant.

        Both counts are divided by the tenants' shares.
        """
        own = self._tenants[request.tenant]
        most = max(tenant.lanes / tenant.share for tenant in self._present.values())
        return most / max(own.lanes / own.share, 1.0 / own.share)


def _latest_of_greediest(
    running: Sequence[Entry], measure: Callable[[Request], int], least: float
) -> Request | None:
    """Returns the last request of the tenant that holds the most, or None.

    Only tenants with several running requests count, and only if they hold at least `least`.
    Requests that were preempted too often are skipped.

    Args:
        measure: returns how much a request holds; it is divided by the tenant's share.
    """
    held: dict[str, float] = {}
    latest: dict[str, Request] = {}
    several = set()
    for _, _, request in running:
        name = request.tenant
        if name in held:
            several.add(name)
        held[name] = held.get(name, 0.0) + measure(request) / request.share
        if not preemption_exhausted(request):
            latest[name] = request
    names = [name for name in latest if name in several and held[name] >= least]
    return latest[max(names, key=held.__getitem__)] if names else None


def _one_lane(request: Request) -> int:
    return 1


def _known_tokens(request: Request) -> int:
    return request.known
