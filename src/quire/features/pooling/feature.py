"""The scheduler's side: a pooling request ends with its prompt, and generates no token."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

from quire.arrays import int32
from quire.config import EngineConfig
from quire.errors import RequestError, generates_nothing_error
from quire.executor import Capacity, Executor
from quire.features.call import RequestField
from quire.features.loop_feature import LoopFeature
from quire.features.pooling.fields import SECOND_TEXT
from quire.plan import RowFlag
from quire.request import Request
from quire.scheduler import Feature, PlanBuilder

COLUMN = "pooled"
"""The column that a plan writes for pooled rows. A value is a `Share`."""
TYPES_COLUMN = "second_text"
"""The column of positions from which on tokens have type 1."""
NO_SECOND_TEXT = 2**30


class Share(enum.IntFlag):
    """A row's part in its request's vector.

    - MEAN: the row's states are added up.
    - BEGINS: the row begins at the first token.
    - ENDS: the row completes the vector.
    - FIRST, LARGEST: an encoder's row, which gives the first state, or the largest numbers.
    """

    MEAN = 1
    BEGINS = 2
    ENDS = 4
    FIRST = 8
    LARGEST = 16


_OF_KIND = {"mean": int(Share.MEAN), "cls": int(Share.FIRST), "max": int(Share.LARGEST)}


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
        share = Share(_OF_KIND.get(str(request.pooling), 0))
        if share & Share.MEAN and request.planned == q_len:
            share |= Share.BEGINS
        return share


class EncoderFeature(PoolingFeature):
    """Serves encoders: every request is pooled, and its prompt is one row.

    Args:
        types: whether the model tells the texts of a pair apart.
    """

    def __init__(self, *, types: bool) -> None:
        super().__init__()
        self._types = types
        self._second: dict[str, int] = {}

    def admit(self, request: Request) -> RequestError | None:
        return generates_nothing_error() if request.pooling is None else None

    def fields(self) -> Mapping[RequestField[Any], Callable[[str, Any], None]]:
        return {SECOND_TEXT: self._set_second}

    def _set_second(self, request_id: str, position: int) -> None:
        self._second[f"{request_id}/0"] = position

    def plan(self, builder: PlanBuilder) -> None:
        requests = builder.requests
        shares = [_OF_KIND.get(str(request.pooling), 0) | int(Share.ENDS) for request in requests]
        builder.write(COLUMN, builder.lanes, int32(shares))
        builder.skip_sampling(range(len(requests)))
        if self._types:
            second = [self._second.get(each.request_id, NO_SECOND_TEXT) for each in requests]
            builder.write(TYPES_COLUMN, builder.lanes, int32(second))

    def finish(self, request: Request) -> None:
        self._second.pop(request.request_id, None)


def open_pooling(config: EngineConfig) -> PoolingFeature:
    """Returns the feature for an engine."""
    if not config.encoder:
        return PoolingFeature()
    return EncoderFeature(types=config.task == "classify")
