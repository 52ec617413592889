"""Per-lane state in arrays, so that a steady step is a few numpy operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.arrays import Int32, int32
from quire.request import Request

Flags = np.ndarray[Any, np.dtype[np.bool_]]

_FEW = 8
"""Decodes of fewer rows never fill a card, so attention cuts them whatever their skew."""


class LaneTable:
    """Counts and tokens of running requests, by lane.

    Attributes:
        known: int32 [lanes]. This and the next two are `Request`'s counts, which are views of them.
        planned: int32 [lanes].
        computed: int32 [lanes].
        tokens: int32 [lanes, longest sequence]. The system gives it pages as they are written.
        last: int32 [lanes], most positions that the request computes. This is `max_total - 1`,
            because its last token is never fed.
        lane_epoch: int32 [lanes], number of requests that have left the lane plus its late rows.
            Rows with a lower epoch are stale.
        drafted: int32 [lanes], draft tokens in flight. The position is at least
            `planned - drafted`.
        prompt_step: int32 [lanes], the step that computes the last known token of the prompt.
        ready_step: int32 [lanes], the first step that may plan the lane's next generated token.
        held: bool [lanes], whether the last row was late and no HELD row has continued it yet.
        resumed: bool [lanes], whether a HELD row is in flight.
        num_held: number of held lanes.
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
        self.held: Flags = np.zeros(num_lanes, dtype=bool)
        self.resumed: Flags = np.zeros(num_lanes, dtype=bool)
        self.num_held = 0
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
        self.let_go(int32([request.lane]))
        self.lane_epoch[request.lane] += 1
        self._free.append(request.lane)
        request.lane = -1

    def take(self) -> tuple[int, int]:
        """Takes a free lane for a request whose tokens and counts stay its own.

        Returns:
            the lane, and its epoch.
        """
        lane = self._free.pop()
        return lane, int(self.lane_epoch[lane])

    def give_back(self, lane: int) -> None:
        """Frees a lane that `take` returned."""
        self.lane_epoch[lane] += 1
        self._free.append(lane)

    def skew(self, lanes: Int32) -> float:
        """Returns the longest context of the lanes divided by their mean one, after the steps in
        flight. Few lanes never need it, and get 1."""
        if len(lanes) < _FEW:
            return 1.0
        planned = self.planned[lanes]
        return len(lanes) * float(planned.max()) / max(float(planned.sum()), 1.0)

    def hold(self, requests: Sequence[Request], step_id: int) -> None:
        """Resets lanes to their late rows. The rows' last positions count as not computed.

        Rows in flight become stale. The next row of such a lane is a HELD row.
        """
        lanes = int32([request.lane for request in requests])
        known = self.known[lanes]
        self.computed[lanes] = self.planned[lanes] = known - 1
        self.drafted[lanes] = 0
        self.ready_step[lanes] = step_id
        self.lane_epoch[lanes] += 1
        for request in requests:
            request.lane_epoch += 1
        self.held[lanes], self.resumed[lanes] = True, False
        self.num_held = int(self.held.sum())

    def let_go(self, lanes: Int32) -> None:
        """Ends the hold of lanes that have continued or are free."""
        if self.num_held:
            self.held[lanes] = self.resumed[lanes] = False
            self.num_held = int(self.held.sum())

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
