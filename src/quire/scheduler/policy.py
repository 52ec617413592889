"""Queue orders. A request's place is a static key, so nothing is ever sorted again."""

from __future__ import annotations

from collections.abc import Callable

from quire.config import SchedulerConfig
from quire.request import Request

SortKey = tuple[float, int]
Entry = tuple[float, int, Request]
"""(key, order, request): orders are unique, so comparing entries never reaches the request."""


MOST_PREEMPTIONS = 4


def preemption_exhausted(request: Request) -> bool:
    """Whether the request was preempted as often as it may be. It starts again once all that it can
    ever need fits, takes it, and then runs to its end: so requests are preempted a bounded number
    of times, and what is computed twice is bounded as well."""
    return request.num_preemptions >= MOST_PREEMPTIONS


def sort_key(config: SchedulerConfig) -> Callable[[Request], SortKey]:
    """The order of `config.policy`; the smallest key runs first.

    fcfs: by arrival. priority: by arrival + weight * priority (lower priority values run first), so
    that a request gains one unit of priority on later ones for every `weight` seconds it waits,
    and none starves.
    """
    weight = config.priority_weight if config.policy == "priority" else 0.0

    def key(request: Request) -> SortKey:
        return request.arrival + weight * request.priority, request.order

    return key
