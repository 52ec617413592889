"""A step's results as the engine reads them, and the scheduler's statistics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.arrays import Float32, Int32
from quire.plan import ChosenExperts, DrawnTokens, Logprobs, Pooled, StopReason
from quire.request import Request


@dataclass(slots=True)
class RequestProgress:
    """One request's part of a `StepProgress`.

    Attributes:
        new_tokens: int32 [n] (empty in mid-prompt).
        finished: whether the request ended (`request.finish_reason` says why).
        logprobs: this row's entries, or None.
        prompt_logprobs: this row's entries, or None.
        drawn: this row's entries, or None.
        experts: this row's entries, or None.
        pooled: float32 [width], the prompt as a vector, or [tokens, width], or None.
        stop_token: the token that ended the request, or None.
        version: version of the weights that gave the new tokens.
    """

    request: Request
    new_tokens: Int32
    finished: bool
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    drawn: DrawnTokens | None = None
    experts: ChosenExperts | None = None
    pooled: Float32 | None = None
    stop_token: int | None = None
    version: int = 0


@dataclass(slots=True)
class StepProgress:
    """The results of one step, for the M requests that still ran when the results came.

    Iterating gives a `RequestProgress` for each request.

    Attributes:
        requests: M requests in row order. Read-only, because steps share the list.
        rows: int32 [M], each request's row in the plan.
        lanes: int32 [M], each request's lane in the plan.
        num_generating: number of generating requests. The other requests follow them.
        tokens: int32 [M, W]. A request's new tokens come first in its line.
        n_tokens: int32 [M], number of new tokens (0 in mid-prompt).
        stop_reason: int32 [M], a `StopReason` each.
        finished: ascending indices of the requests that ended in this step.
        logprobs: the device's log-probabilities of the plan's rows.
        prompt_logprobs: the device's log-probabilities of prompt tokens, for the plan's rows.
        drawn: how the device drew the tokens of the plan's rows.
        experts: the experts that the device chose for positions of the plan's rows.
        pooled: the device's vectors of the plan's rows.
        version: version of the weights that the step computed with: number of their updates.
    """

    step_id: int
    requests: list[Request]
    rows: Int32
    lanes: Int32
    num_generating: int
    tokens: Int32
    n_tokens: Int32
    stop_reason: Int32
    finished: list[int] = field(default_factory=list)
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    drawn: DrawnTokens | None = None
    experts: ChosenExperts | None = None
    pooled: Pooled | None = None
    version: int = 0

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[RequestProgress]:
        ended = set(self.finished)
        spans = {name: _spans(part, self.rows) for name, part in self._parts()}
        for i in range(len(self.requests)):
            yield self._one(i, i in ended, {name: each[i] for name, each in spans.items()})

    def __getitem__(self, index: int) -> RequestProgress:
        row = self.rows[index : index + 1]
        spans = {name: _spans(part, row)[0] for name, part in self._parts()}
        return self._one(index, index in self.finished, spans)

    def _parts(self) -> list[tuple[str, Entries]]:
        """Returns the entries that the step has, by field."""
        found = [(name, getattr(self, name)) for name in ENTRIES]
        return [(name, entries) for name, entries in found if entries is not None]

    def _one(self, i: int, finished: bool, spans: dict[str, Span]) -> RequestProgress:
        new = self.tokens[i, : self.n_tokens[i]]
        stopped = finished and self.stop_reason[i] == StopReason.STOP_TOKEN and len(new) > 0
        return RequestProgress(
            request=self.requests[i],
            new_tokens=new,
            finished=finished,
            **{name: _part(getattr(self, name), span) for name, span in spans.items()},
            pooled=None if self.pooled is None else _vector(self.pooled, int(self.rows[i])),
            stop_token=int(new[-1]) if stopped else None,
            version=self.version,
        )


Entries = Logprobs | DrawnTokens | ChosenExperts
"""Arrays with an entry for each of M tokens or positions, in row order."""
ENTRIES = ("logprobs", "prompt_logprobs", "drawn", "experts")
"""The fields of a `StepProgress` that hold entries."""
Span = tuple[int, int]
"""Range of a row's entries: start, end."""


def _vector(pooled: Pooled, row: int) -> Float32 | None:
    (places,) = np.nonzero(pooled.rows == row)
    if not len(places):
        return None
    if pooled.counts is None:
        vector: Float32 = pooled.values[places[0]]
        return vector
    start = int(pooled.counts[: places[0]].sum())
    vectors: Float32 = pooled.values[start : start + int(pooled.counts[places[0]])]
    return vectors


def _spans(entries: Entries, rows: Int32) -> list[Span]:
    """Returns the range of each row's entries."""
    starts = np.searchsorted(entries.rows, rows).tolist()
    ends = np.searchsorted(entries.rows, rows, side="right").tolist()
    return list(zip(starts, ends, strict=True))


def _part(entries: Any, span: Span) -> Any:
    """Returns a range of entries, or None for an empty range."""
    start, end = span
    if start == end:
        return None
    arrays = (getattr(entries, name) for name in entries.__struct_fields__)
    return type(entries)(*(array[start:end] for array in arrays))


@dataclass(slots=True)
class SchedulerStats:
    """Counts since the start, and the current state.

    Attributes:
        running: Number of requests with a lane.
        waiting: Number of queued and parked requests.
        blocks_total: Number of blocks of each KV group.
        blocks_used: Number of each KV group's blocks in use by requests.
        blocks_cached: Number of each KV group's blocks kept for reuse; requests may evict them.
        blocks_free: Number of each KV group's empty blocks.
        prefix_query_tokens: Tokens looked up in the prefix tree.
        prefix_hit_tokens: Tokens found in the prefix tree.
        evicted_blocks: Blocks of all groups evicted from the prefix tree.
        copied_blocks: Blocks of all groups copied because requests share them only in part.
        preemptions: Number of times a running request was put back into the queue.
        swapped: Number of preemptions after which a feature restores the blocks.
        late_rows: Number of rows that gave no token because their host inputs were late.
        delay_seconds: Seconds of all requests, by cause; see `DelayClock`.
    """

    running: int
    waiting: int
    blocks_total: list[int]
    blocks_used: list[int]
    blocks_cached: list[int]
    blocks_free: list[int]
    prefix_query_tokens: int
    prefix_hit_tokens: int
    evicted_blocks: int
    copied_blocks: int
    preemptions: int
    swapped: int
    late_rows: int
    delay_seconds: dict[str, float]
