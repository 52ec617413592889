"""A step's rows, and the requests that it admits.

`DecodeRows` has the rows of generating requests, and a `PrefillChunk` is the row of a prompt.
`StepInFlight` has all rows of one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.arrays import Int32, int32
from quire.plan import Admit, RowFlag
from quire.request import Request
from quire.sampling_params import SamplingParams

Index = np.ndarray[Any, np.dtype[np.intp]]

_EMPTY = int32([])


@dataclass(slots=True)
class DecodeRows:
    """Rows of generating requests. Shared between steps: never changed, only replaced.

    Attributes:
        requests: R requests.
        lanes: int32 [R].
        q_len: int32 [R], one token for each row, plus the draft tokens that the row verifies.
        flags: int32 [R], a `RowFlag` each.
        lane_epoch: int32 [R].
        drafts: whether any row verifies draft tokens.
    """

    requests: list[Request]
    lanes: Int32
    q_len: Int32
    flags: Int32
    lane_epoch: Int32
    drafts: bool = False

    @classmethod
    def empty(cls) -> DecodeRows:
        return cls([], _EMPTY, _EMPTY, _EMPTY, _EMPTY)

    def select(self, index: Index) -> DecodeRows:
        return DecodeRows(
            [self.requests[i] for i in index.tolist()],
            self.lanes[index],
            self.q_len[index],
            self.flags[index],
            self.lane_epoch[index],
        )

    def joined_by(self, requests: list[Request]) -> DecodeRows:
        """Returns these rows followed by those of requests that begin to generate."""
        count = len(requests)
        return DecodeRows(
            self.requests + requests,
            np.concatenate([self.lanes, int32([r.lane for r in requests])]),
            np.concatenate([self.q_len, np.ones(count, dtype=np.int32)]),
            np.concatenate([self.flags, np.full(count, RowFlag.SAMPLE, dtype=np.int32)]),
            np.concatenate([self.lane_epoch, int32([r.lane_epoch for r in requests])]),
        )

    def without(self, lanes: list[int]) -> DecodeRows:
        keep = np.nonzero(~np.isin(self.lanes, lanes))[0]
        return self.select(keep) if len(keep) < len(self.lanes) else self

    def with_drafts(self, drafts: Int32) -> DecodeRows:
        """Returns rows that verify up to `drafts` draft tokens each, int32 [R]."""
        q_len = 1 + drafts
        return DecodeRows(
            self.requests, self.lanes, q_len, self.flags, self.lane_epoch, drafts=True
        )


@dataclass(slots=True)
class PrefillChunk:
    """The row of a request in its prompt.

    Attributes:
        start: position of the first token that the row computes.
        length: number of tokens. The host knows them all.
        forked: whether the tokens before `start` lie in blocks of a sibling.
    """

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
        """Number of logit rows.

        The end of a prompt has one, to sample from. With prompt logprobs there is one for each
        position whose logprobs were not delivered yet. Only the first of several siblings delivers
        them.
        """
        end, request = self.start + self.length, self.request
        if wants_prompt_logprobs(request):
            first = max(self.start, request.prompt_logprobs_done)
            if first < request.prompt_len - 1:
                return end - first
        return int(self.ends_prompt)


def wants_prompt_logprobs(request: Request) -> bool:
    return request.params.prompt_logprobs is not None and request.leader is None


@dataclass(slots=True)
class StepInFlight:
    """All rows of a step: the generating ones, then the prompts'.

    It is made when the step is planned, and kept until its results come.

    Attributes:
        requests: R requests in row order.
        lanes: int32 [R].
        lane_epoch: int32 [R]. A row is stale once its lane has a higher epoch.
        q_len: int32 [R], number of computed positions.
        n_logits: int32 [R], number of positions with logits.
        flags: int32 [R], a `RowFlag` each.
        num_generating: number of rows of generating requests.
        drafts: whether any row verifies draft tokens.
        chunks: the prompts' rows.
        version: number of updates of the weights before the step.
    """

    step_id: int
    requests: list[Request]
    lanes: Int32
    lane_epoch: Int32
    q_len: Int32
    n_logits: Int32
    flags: Int32
    num_generating: int
    drafts: bool
    chunks: list[PrefillChunk]
    version: int = 0

    @classmethod
    def join(cls, step_id: int, rows: DecodeRows, chunks: list[PrefillChunk]) -> StepInFlight:
        """Joins all rows. Without chunks, the arrays are those of `rows`."""
        step = cls(
            step_id,
            rows.requests,
            rows.lanes,
            rows.lane_epoch,
            rows.q_len,
            rows.q_len,
            rows.flags,
            len(rows.lanes),
            rows.drafts,
            chunks,
        )
        if chunks:
            prompts = [chunk.request for chunk in chunks]
            step.requests = rows.requests + prompts
            step.lanes = _joined(rows.lanes, [r.lane for r in prompts])
            step.lane_epoch = _joined(rows.lane_epoch, [r.lane_epoch for r in prompts])
            step.q_len = _joined(rows.q_len, [chunk.length for chunk in chunks])
            step.n_logits = _joined(rows.q_len, [chunk.num_logits for chunk in chunks])
            step.flags = _joined(rows.flags, [chunk.flags for chunk in chunks])
        return step

    def select(self, rows: Index) -> StepInFlight:
        """Returns the step with only these rows, given in ascending order."""
        generating = int(np.searchsorted(rows, self.num_generating))
        return StepInFlight(
            self.step_id,
            [self.requests[i] for i in rows.tolist()],
            self.lanes[rows],
            self.lane_epoch[rows],
            self.q_len[rows],
            self.n_logits[rows],
            self.flags[rows],
            generating,
            self.drafts,
            [self.chunks[i - self.num_generating] for i in rows[generating:].tolist()],
            self.version,
        )


def _joined(array: Int32, more: list[int]) -> Int32:
    return np.concatenate([array, int32(more)])


def make_admit(request: Request, tokens: Int32, computed: int, params: SamplingParams) -> Admit:
    """Returns the `Admit` of a request that has just got its lane.

    Args:
        tokens: int32 [known].
        computed: number of these tokens that are computed.
        params: sampling parameters, as the device applies them.
    """
    return Admit(
        lane=request.lane,
        lane_epoch=request.lane_epoch,
        request_id=request.request_id,
        tokens=request.as_read(tokens),
        prompt_len=request.prompt_len,
        computed=computed,
        max_total=request.max_total,
        params=params,
        seed=request.seed,
        sample_index=request.sample_index,
    )
