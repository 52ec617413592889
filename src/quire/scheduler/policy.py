"""Sort keys of requests. A key never changes, so queues are never sorted again."""

from __future__ import annotations

from collections.abc import Callable

from quire.config import SchedulerConfig
from quire.request import Request

SortKey = tuple[float, int]
Entry = tuple[float, int, Request]
"""(key, order, request): orders are unique, so comparing entries never reaches the request."""


MOST_PREEMPTIONS = 4


def preemption_exhausted(request: Request) -> bool:
    """Whether the request was preempted as often as it may be. Such a request starts again once all
    blocks that it can ever need are available, books them, and runs to its end. So preemptions, and
    tokens computed twice, are bounded."""
    return request.num_preemptions >= MOST_PREEMPTIONS


def sort_key(config: SchedulerConfig) -> Callable[[Request], SortKey]:
    """Returns the key function of `config.policy`; the smallest key runs first.

    fcfs: by arrival. priority: by arrival + weight * priority (lower priority values run first), so
    that a request gains one unit of priority on later ones for every `weight` seconds it waits,
    and none starves.
    """
    weight = config.priority_weight if config.policy == "priority" else 0.0

    def key(request: Request) -> SortKey:
        return request.arrival + weight * request.priority, request.order

    return key
