"""The scheduler's side: a pooling request ends with its prompt, and generates no token."""

from __future__ import annotations

import enum

from quire.arrays import int32
from quire.config import EngineConfig
from quire.executor import Capacity, Executor
from quire.features.loop_feature import LoopFeature
from quire.plan import RowFlag
from quire.request import Request
from quire.scheduler import Feature, PlanBuilder

COLUMN = "pooled"
"""The column that a plan writes for pooled rows. A value is a `Share`."""


class Share(enum.IntFlag):
    """A row's part in its request's vector.

    - MEAN: the row's states are added up.
    - BEGINS: the row begins at the first token.
    - ENDS: the row completes the vector.
    """

    MEAN = 1
    BEGINS = 2
    ENDS = 4


class PoolingFeature(Feature, LoopFeature):
    """Marks the rows of pooling requests.

    A pooling request's `max_total` is one above its prompt's length. So the scheduler plans nothing
    after the prompt, and the runner reports the request's end at the prompt's end.
    """

    def __init__(self) -> None:
        self._active: dict[str, Request] = {}

    def start(self, executor: Executor, capacity: Capacity) -> Feature | None:
        return self

    def reusable(self, request: Request, n: int) -> int:
        """Returns the tokens that may come from the cache: 0 for a mean, because it needs the
        states of all tokens, which no cache holds."""
        pooling = request.pooling
        if pooling is None:
            return n
        self._active[request.request_id] = request
        return 0 if pooling == "mean" else n

    def plan(self, builder: PlanBuilder) -> None:
        if not self._active:
            return
        lanes, shares, ended = [], [], []
        for row, request in enumerate(builder.requests):
            if request.pooling is None:
                continue
            share = self._share(request, int(builder.q_len[row]))
            if builder.flags[row] & RowFlag.SAMPLE:
                share |= Share.ENDS
                ended.append(row)
                self._active.pop(request.request_id, None)
            if share & (Share.MEAN | Share.ENDS):
                lanes.append(request.lane)
                shares.append(int(share))
        if lanes:
            builder.write(COLUMN, int32(lanes), int32(shares))
            builder.skip_sampling(ended)
        self._active = {name: r for name, r in self._active.items() if not r.finished}

    @staticmethod
    def _share(request: Request, q_len: int) -> Share:
        if request.pooling == "last":
            return Share(0)
        return Share.MEAN | Share.BEGINS if request.planned == q_len else Share.MEAN


def open_pooling(config: EngineConfig) -> PoolingFeature:
    """Returns the feature for an engine."""
    return PoolingFeature()
