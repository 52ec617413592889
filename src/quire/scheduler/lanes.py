"""Per-lane state in arrays, so that a steady step is a few numpy operations."""

from __future__ import annotations

import numpy as np

from quire.arrays import Int32
from quire.request import Request


class LaneTable:
    """Counts and tokens of running requests, by lane.

    Attributes:
        known: int32 [lanes]; `Request.known` is a view of it.
        planned: int32 [lanes]; `Request.planned` is a view of it.
        computed: int32 [lanes]; `Request.computed` is a view of it.
        tokens: int32 [lanes, longest sequence]. A page takes memory when it is first written.
        last: int32 [lanes], most positions that the request computes: `max_total - 1`, because its
            last token is never fed.
        lane_epoch: int32 [lanes], number of requests that have left the lane. A row with a lower
            one is stale.
        drafted: int32 [lanes], draft tokens in flight. The position is at least
            `planned - drafted`.
        prompt_step: int32 [lanes], the step that computes the last known token of the prompt.
        ready_step: int32 [lanes], the first step that may plan the lane's next generated token.
    """

    def __init__(self, num_lanes: int, max_len: int) -> None:
        self._counts: Int32 = np.zeros((3, num_lanes), dtype=np.int32)
        self.known, self.planned, self.computed = self._counts
        self.tokens: Int32 = np.empty((num_lanes, max_len), dtype=np.int32)
        self.last: Int32 = np.zeros(num_lanes, dtype=np.int32)
        self.lane_epoch: Int32 = np.zeros(num_lanes, dtype=np.int32)
        self.drafted: Int32 = np.zeros(num_lanes, dtype=np.int32)
        self.prompt_step: Int32 = np.zeros(num_lanes, dtype=np.int32)
        self.ready_step: Int32 = np.zeros(num_lanes, dtype=np.int32)
        self._free = list(range(num_lanes - 1, -1, -1))

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def next_free(self) -> int:
        """The lane that `assign` gives next."""
        return self._free[-1]

    def assign(self, request: Request) -> None:
        """Gives the request the lane `next_free`."""
        lane = self._free.pop()
        request.bind(self.tokens[lane], self._counts[:, lane])
        request.lane = lane
        request.lane_epoch = int(self.lane_epoch[lane])
        self.last[lane] = request.max_total - 1
        self.drafted[lane] = 0

    def release(self, request: Request) -> None:
        """Takes the lane back; the request keeps its tokens and counts."""
        request.unbind()
        self.lane_epoch[request.lane] += 1
        self._free.append(request.lane)
        request.lane = -1

    def accept(self, lanes: Int32, tokens: Int32, n: Int32) -> None:
        """Appends each lane's first `n` tokens of `tokens`, int32 [lanes, K + 1]."""
        known = self.known[lanes]
        if tokens.shape[1] == 1:
            if n.all():
                self.tokens[lanes, known] = tokens[:, 0]
            else:
                new = n > 0
                self.tokens[lanes[new], known[new]] = tokens[new, 0]
        else:
            row, column = np.nonzero(np.arange(tokens.shape[1]) < n[:, None])
            self.tokens[lanes[row], known[row] + column] = tokens[row, column]
        self.known[lanes] = known + n
