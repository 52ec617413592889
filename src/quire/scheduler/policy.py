"""Queue orders. A request's place is a static key, so nothing is ever sorted again."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from quire.config import SchedulerConfig
from quire.request import Request, RequestStatus

Key = tuple[float, int]
Entry = tuple[float, int, Request]
"""(key, order, request): orders are unique, so comparing entries never reaches the request."""


def key_function(config: SchedulerConfig) -> Callable[[Request], Key]:
    """The order of `config.policy`; the smallest key runs first.

    fcfs: by arrival. priority: by arrival + weight * priority (lower priority values run first), so
    that a request gains one unit of priority on later ones for every `weight` seconds it waits,
    and none starves.
    """
    weight = config.priority_weight if config.policy == "priority" else 0.0

    def key(request: Request) -> Key:
        return request.arrival + weight * request.priority, request.order

    return key


class WaitingQueue:
    """Requests in key order. Removal is lazy: an entry counts while its request is WAITING."""

    _COMPACT_FROM = 64

    def __init__(self, key: Callable[[Request], Key]) -> None:
        self._key = key
        self._heap: list[Entry] = []
        self._stale = 0

    def __len__(self) -> int:
        return len(self._heap) - self._stale

    def push(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        heapq.heappush(self._heap, (*self._key(request), request))

    def peek(self) -> Request | None:
        while self._heap:
            request = self._heap[0][2]
            if request.status is RequestStatus.WAITING:
                return request
            heapq.heappop(self._heap)
            self._stale -= 1
        return None

    def pop(self) -> None:
        """Take out what `peek` returned; the caller changes its status."""
        heapq.heappop(self._heap)

    def forget(self) -> None:
        """One of the queued requests is no longer WAITING."""
        self._stale += 1
        if self._stale > max(self._COMPACT_FROM, len(self._heap) // 2):
            self._heap = [e for e in self._heap if e[2].status is RequestStatus.WAITING]
            heapq.heapify(self._heap)
            self._stale = 0
