"""Per-lane state in arrays, so that a steady step is a few numpy operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.arrays import Int32, int32
from quire.plan import RowFlag
from quire.request import Request

Index = np.ndarray[Any, np.dtype[np.intp]]

_NONE = int32([])


class LaneTable:
    """Counts and tokens of running requests, by lane. All arrays are int32 [lanes].

    known, planned, computed: as in `Request`, whose counts are views of these.
    tokens: int32 [lanes, longest sequence]. Its pages come into being as they are written.
    last: positions a request will ever compute, `max_total - 1`: the last token is never fed.
    lane_epoch: counts the requests that have left a lane; a row of an earlier one is stale.
    drafted: draft tokens in flight, so that `planned - drafted` bounds the position from below.
    prompt_step: the step that computes the last known token of a prompt.
    ready_step: the first step that may plan the lane's next generated token.
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


@dataclass(slots=True)
class Rows:
    """Rows of generating requests. Shared between steps: never changed, only replaced.

    lanes, q_len, flags, lane_epoch: int32 [R].
    """

    requests: list[Request]
    lanes: Int32
    q_len: Int32
    flags: Int32
    lane_epoch: Int32
    drafts: bool = False

    @classmethod
    def none(cls) -> Rows:
        return cls([], _NONE, _NONE, _NONE, _NONE)

    def select(self, index: Index) -> Rows:
        return Rows(
            [self.requests[i] for i in index.tolist()],
            self.lanes[index],
            self.q_len[index],
            self.flags[index],
            self.lane_epoch[index],
        )

    def joined_by(self, requests: list[Request]) -> Rows:
        """Returns these rows followed by those of requests that begin to generate."""
        count = len(requests)
        return Rows(
            self.requests + requests,
            np.concatenate([self.lanes, int32([r.lane for r in requests])]),
            np.concatenate([self.q_len, np.ones(count, dtype=np.int32)]),
            np.concatenate([self.flags, np.full(count, RowFlag.SAMPLE, dtype=np.int32)]),
            np.concatenate([self.lane_epoch, int32([r.lane_epoch for r in requests])]),
        )

    def without(self, lanes: list[int]) -> Rows:
        keep = np.nonzero(~np.isin(self.lanes, lanes))[0]
        return self.select(keep) if len(keep) < len(self.lanes) else self

    def with_drafts(self, drafts: Int32) -> Rows:
        """Returns rows that verify up to `drafts` draft tokens each, int32 [R]."""
        return Rows(self.requests, self.lanes, 1 + drafts, self.flags, self.lane_epoch, drafts=True)


@dataclass(slots=True)
class Chunk:
    """A prompt row: `length` known tokens from position `start` on. forked: a sibling's blocks hold
    the tokens before it."""

    request: Request
    start: int
    length: int
    forked: bool = False

    @property
    def ends_prompt(self) -> bool:
        return self.start + self.length == self.request.known

    @property
    def flags(self) -> int:
        return RowFlag.PROMPT | RowFlag.SAMPLE if self.ends_prompt else RowFlag.PROMPT

    @property
    def num_logits(self) -> int:
        """Number of logit rows: one to sample from at the prompt's end; with prompt logprobs all
        that are not delivered yet. (Of siblings, the first delivers the prompt's logprobs.)"""
        end, request = self.start + self.length, self.request
        if wants_prompt_logprobs(request):
            first = max(self.start, request.prompt_logprobs_done)
            if first < request.prompt_len - 1:
                return end - first
        return int(self.ends_prompt)


def wants_prompt_logprobs(request: Request) -> bool:
    return request.params.prompt_logprobs is not None and request.leader is None


@dataclass(slots=True)
class Launched:
    """A step in flight, as `update` needs it. Generating rows come first, then chunks."""

    step_id: int
    requests: list[Request]
    lanes: Int32
    q_len: Int32
    lane_epoch: Int32
    num_generating: int
    drafts: bool
    chunks: list[Chunk]

    def select(self, rows: Index) -> Launched:
        """Returns only these rows, given in order."""
        generating = int(np.searchsorted(rows, self.num_generating))
        return Launched(
            self.step_id,
            [self.requests[i] for i in rows.tolist()],
            self.lanes[rows],
            self.q_len[rows],
            self.lane_epoch[rows],
            generating,
            self.drafts,
            [self.chunks[i - self.num_generating] for i in rows[generating:].tolist()],
        )
