"""Turns between tenants: deficit round-robin over their queues.

Each tenant has a queue of its own, in policy order. The one whose turn it is starts requests on
credit, a number of tokens that it is granted once a round; what its requests compute is taken off
when they start and, for what they generated, when they stop. With its credit used up the turn
passes on; debts are worked off in later rounds. Tenants who have asked for little lately have their
grant of the round left, and go first when they come. (Shreedhar & Varghese, "Efficient Fair Queuing
using Deficit Round Robin", 1995; that what is taken is known late, and becomes debt, is the
difference.)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping

from quire.request import Request
from quire.scheduler.policy import SortKey
from quire.scheduler.waiting import WaitingQueue

_GRANT = 256
"""Tokens a tenant of share 1 gets in a round: about a request, so that turns take little counting
and nobody waits long for his."""


class Tenant:
    """queue: what waits. tokens: of these. requests: how many are not finished. lanes: how many
    run. credit: tokens it may still start, negative if it owes some; granted for `round`."""

    def __init__(self, name: str, key: Callable[[Request], SortKey], round: int) -> None:
        self.name = name
        self.queue = WaitingQueue(key)
        self.queued = False
        self.share = 1.0
        self.tokens = self.requests = self.lanes = 0
        self.credit = 0.0
        self.round = round

    def grant(self, round: int) -> None:
        """Its credit for all rounds since the last grant; what was not used does not add up."""
        if round > self.round:
            most = _GRANT * self.share
            self.credit = min(self.credit + (round - self.round) * most, most)
            self.round = round

    @property
    def rounds_in_debt(self) -> int:
        """Rounds until it has credit again."""
        return math.floor(-self.credit / (_GRANT * self.share)) + 1


class FairQueue:
    """The waiting requests of all tenants, in the order in which they may start."""

    def __init__(self, key: Callable[[Request], SortKey]) -> None:
        self._key = key
        self._tenants: dict[str, Tenant] = {}
        self._turns: deque[Tenant] = deque()
        self._round = 1
        self._present: dict[str, Tenant] = {}
        self._count = 0
        self.tokens = 0
        """Of all that wait."""

    def __len__(self) -> int:
        return self._count

    @property
    def contested(self) -> bool:
        """Whether more than one tenant has unfinished requests."""
        return len(self._present) > 1

    def tenant(self, request: Request) -> Tenant:
        return self._tenants[request.tenant]

    # -- requests come and go ------------------------------------------------------------------

    def enter(self, request: Request) -> None:
        """A new request, before it is pushed."""
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            tenant = Tenant(request.tenant, self._key, self._round - 1)
            self._tenants[request.tenant] = tenant
        tenant.share = request.share
        tenant.requests += 1
        self._present[request.tenant] = tenant

    def leave(self, request: Request) -> None:
        """It is finished."""
        tenant = self.tenant(request)
        tenant.requests -= 1
        if tenant.requests == 0:
            del self._present[request.tenant]

    def push(self, request: Request) -> None:
        tenant = self.tenant(request)
        if not tenant.queued:
            tenant.queued = True
            tenant.grant(self._round)
            if tenant.credit > 0:
                self._turns.appendleft(tenant)
            else:
                self._turns.append(tenant)
        tenant.queue.push(request)
        self._add(tenant, 1, request.known)

    def peek(self) -> Request | None:
        """The request that is next. The same one until it is popped, or another tenant comes."""
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
        """Take out what `peek` returned; the caller changes its status."""
        tenant = self.tenant(request)
        tenant.queue.pop()
        self._add(tenant, -1, -request.known)

    def forget(self, request: Request) -> None:
        """One of the queued requests is no longer WAITING."""
        tenant = self.tenant(request)
        tenant.queue.forget()
        self._add(tenant, -1, -request.known)

    def _add(self, tenant: Tenant, count: int, tokens: int) -> None:
        self._count += count
        tenant.tokens += tokens
        self.tokens += tokens

    # -- what they take ------------------------------------------------------------------------

    def start(self, request: Request, computed: int) -> None:
        """It has a lane; `computed` of its tokens need not be computed."""
        self.tenant(request).lanes += 1
        self._charge(request, computed)

    def stop(self, request: Request) -> None:
        """It has lost its lane."""
        self.tenant(request).lanes -= 1
        self._charge(request, 0)

    def _charge(self, request: Request, free: int) -> None:
        """For tokens not charged before: what a preemption costs is nobody's fault."""
        tokens = request.known - max(request.charged, free)
        request.charged = request.known
        self.tenant(request).credit -= max(tokens, 0)

    def lanes_beside(self, request: Request) -> float:
        """How many lanes the tenant with the most has for each of this request's tenant, both for
        their shares."""
        own = self.tenant(request)
        most = max(tenant.lanes / tenant.share for tenant in self._present.values())
        return most / max(own.lanes / own.share, 1.0 / own.share)

    def waiting(self) -> dict[str, tuple[int, float]]:
        """By tenant: the tokens that wait, and its share."""
        return {t.name: (t.tokens, t.share) for t in self._turns if t.tokens}


def fair_parts(wants: Mapping[str, tuple[int, float]], budget: int) -> dict[str, int]:
    """A budget of tokens shared out by weight, max-min: nobody gets more than he wants, and what he
    leaves goes to the others. wants: by name (tokens, share). All get one token at least, even
    where that is more than the budget."""
    parts = {}
    total = sum(share for _, share in wants.values())
    for name in sorted(wants, key=lambda name: wants[name][0] / wants[name][1]):
        want, share = wants[name]
        parts[name] = part = max(1, min(want, int(budget * share / total)))
        budget = max(budget - part, 0)
        total -= share
    return parts
