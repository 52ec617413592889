"""Requests without a lane: queued in policy order, or parked."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

from quire.config import SchedulerConfig
from quire.request import Request, RequestStatus
from quire.scheduler.delays import KV, PREEMPTED, QUEUE, SIBLING, DelayClock

SortKey = tuple[float, int]
Entry = tuple[float, int, Request]
"""(key, order, request): orders are unique, so comparing entries never reaches the request."""


MOST_PREEMPTIONS = 4


def preemption_exhausted(request: Request) -> bool:
    """Whether the request was preempted as often as it may be.

    Such a request waits until all blocks for its longest length are available, books them, and runs
    to its end. This bounds the number of preemptions and of tokens computed twice.
    """
    return request.num_preemptions >= MOST_PREEMPTIONS


def sort_key(config: SchedulerConfig) -> Callable[[Request], SortKey]:
    """Returns the key function of `config.policy`; the smallest key runs first.

    A key never changes, so queues are never sorted again.

    - fcfs sorts by arrival.
    - priority sorts by arrival + weight * priority, so lower priority values run first. A request
      gains one unit of priority on later ones for every `weight` seconds that it waits. So no
      request starves.
    """
    weight = config.priority_weight if config.policy == "priority" else 0.0

    def key(request: Request) -> SortKey:
        return request.arrival + weight * request.priority, request.order

    return key


class WaitingQueue:
    """Waiting requests in key order. Removal is lazy: an entry counts while its request is WAITING.

    Attributes:
        tokens: number of tokens of all requests in the queue.
    """

    _COMPACT_FROM = 64

    def __init__(self, key: Callable[[Request], SortKey]) -> None:
        self._key = key
        self._heap: list[Entry] = []
        self._stale = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._heap) - self._stale

    def push(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        self.tokens += request.known
        heapq.heappush(self._heap, (*self._key(request), request))

    def peek(self) -> Request | None:
        while self._heap:
            request = self._heap[0][2]
            if request.status is RequestStatus.WAITING:
                return request
            heapq.heappop(self._heap)
            self._stale -= 1
        return None

    def pop(self, request: Request) -> None:
        """Removes the request that `peek` returned; the caller changes its status."""
        heapq.heappop(self._heap)
        self.tokens -= request.known

    def forget(self, request: Request) -> None:
        """Removes a queued request whose status is no longer WAITING."""
        self.tokens -= request.known
        self._stale += 1
        if self._stale > max(self._COMPACT_FROM, len(self._heap) // 2):
            self._heap = [e for e in self._heap if e[2].status is RequestStatus.WAITING]
            heapq.heapify(self._heap)
            self._stale = 0


class Queue(Protocol):
    """The part of `Order` that `WaitingSet` uses."""

    def __len__(self) -> int: ...
    def push(self, request: Request) -> None: ...
    def pop(self, request: Request) -> None: ...
    def forget(self, request: Request) -> None: ...


class WaitingSet:
    """Places requests in the queue, or parks them while they cannot run.

    A request cannot run while a feature is not ready for it. A sibling (n > 1) cannot run until its
    leader's prompt, which both share, is planned.

    Args:
        unready: returns what a feature waits for before the request can run, or None.
        clock: is told what each request waits for.
    """

    def __init__(
        self, queue: Queue, unready: Callable[[Request], str | None], clock: DelayClock
    ) -> None:
        self.queue = queue
        self._unready = unready
        self._clock = clock
        self._num_parked = 0
        self._siblings: dict[str, list[Request]] = {}

    def __len__(self) -> int:
        return len(self.queue) + self._num_parked

    def place(self, request: Request) -> None:
        """Queues or parks a request that is neither queued nor parked."""
        leader = _awaited_leader(request)
        if leader is not None:
            self._siblings.setdefault(leader.request_id, []).append(request)
            self._park(request, SIBLING)
        elif (cause := self._unready(request)) is not None:
            self._park(request, cause)
        else:
            self._clock.enter(request, PREEMPTED if request.num_preemptions else QUEUE)
            self.queue.push(request)

    def _park(self, request: Request, cause: str) -> None:
        self._clock.enter(request, cause)
        request.status = RequestStatus.PARKED
        self._num_parked += 1

    def park(self, request: Request) -> None:
        """Removes the next request from the queue, and parks it until its blocks are loaded."""
        self.queue.pop(request)
        self._park(request, KV)

    def wake(self, request: Request) -> None:
        """Asks the features again about a parked request."""
        if request.status is RequestStatus.PARKED and _awaited_leader(request) is None:
            self._num_parked -= 1
            self.place(request)

    def wake_siblings(self, leader: Request) -> None:
        """Wakes the leader's siblings. Called when its prompt is planned, or when it has ended or
        was preempted."""
        for sibling in self._siblings.pop(leader.request_id, ()):
            self.wake(sibling)

    def remove(self, request: Request, status: RequestStatus) -> None:
        """Removes a request and sets its status."""
        parked = request.status is RequestStatus.PARKED
        request.status = status
        if parked:
            self._num_parked -= 1
        else:
            self.queue.forget(request)


def _awaited_leader(request: Request) -> Request | None:
    """Returns the leader whose prompt a request waits for, or None."""
    leader = request.leader
    if leader is None or leader.finished or not leader.order:
        return None
    if leader.generating or leader.num_preemptions or request.num_preemptions:
        return None
    return leader
