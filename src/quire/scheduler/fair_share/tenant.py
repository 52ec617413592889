"""One tenant's queue and credit, and the division of a budget between tenants."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from quire.request import Request
from quire.scheduler.policy import SortKey
from quire.scheduler.waiting import WaitingQueue

_GRANT = 256
"""Tokens granted to a tenant of share 1 in a round: about a request, so that turns need little
counting and waits for a turn are short."""


class Tenant:
    """A tenant's state.

    queue: waiting requests. queued: whether the tenant takes turns. requests: unfinished ones.
    lanes: lanes held. credit: tokens it may still start, negative if it owes some; granted for
    `round`.
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
        """Adds the credit of all rounds since the last grant; unused credit does not add up."""
        if round > self.round:
            most = _GRANT * self.share
            self.credit = min(self.credit + (round - self.round) * most, most)
            self.round = round

    @property
    def rounds_in_debt(self) -> int:
        """Rounds until it has credit again."""
        return math.floor(-self.credit / (_GRANT * self.share)) + 1


def fair_parts(wants: Mapping[str, tuple[int, float]], budget: int) -> dict[str, int]:
    """Divides a budget of tokens by weight, max-min fair: no tenant gets more than it wants, and
    the rest goes to the others. wants: (tokens, share) by tenant. Each gets one token at least,
    even if that exceeds the budget."""
    parts = {}
    total = sum(share for _, share in wants.values())
    for name in sorted(wants, key=lambda name: wants[name][0] / wants[name][1]):
        want, share = wants[name]
        parts[name] = part = max(1, min(want, int(budget * share / total)))
        budget = max(budget - part, 0)
        total -= share
    return parts
