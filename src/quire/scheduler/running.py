"""The requests that hold a lane, and which of their tokens the next step computes."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from quire.arrays import Int32, int32
from quire.cache import BlockManager
from quire.config import SchedulerConfig
from quire.request import Request, RequestStatus
from quire.scheduler.lanes import Chunk, LaneTable, Launched, Rows, wants_prompt_logprobs
from quire.scheduler.policy import Entry, SortKey, preemption_exhausted
from quire.scheduler.tenants import fair_parts


class RunningSet:
    """Running requests, in policy order, and their lanes.

    entries: all of them. generating: the rows of those that generate, in the order they began to.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        key: Callable[[Request], SortKey],
        lookaheads: Sequence[Callable[[Request, int], int]],
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._key = key
        self._lookaheads = lookaheads
        self.lanes = LaneTable(config.max_num_seqs, config.max_model_len)
        self.entries: list[Entry] = []
        self._prompts: list[Entry] = []
        self.generating = Rows.none()
        self._joining: list[Request] = []

    def __len__(self) -> int:
        return len(self.entries)

    def last(self, contested: bool) -> Request:
        """The first to be preempted when blocks run out: the latest in policy order, of several
        tenants the latest of who holds the most for his share. What each has running longest is
        never taken from it, so that all come to their ends. Of those that stay only where there is
        no other: they have their blocks, but those of a window are booked as it moves."""
        greediest = self._latest_of_greediest(_tokens, 0.0) if contested else None
        if greediest is not None:
            return greediest
        able = (r for _, _, r in reversed(self.entries) if not preemption_exhausted(r))
        return next(able, self.entries[-1][2])

    def victim_for(self, request: Request | None, blocked_head: Request | None) -> Request | None:
        """The running request that must stop for `request`, which is next and of another tenant:
        where it finds no free lane or, being `blocked_head`, no free blocks, and somebody holds more
        than twice what its own tenant would."""
        if request is None or (self.lanes.has_free and request is not blocked_head):
            return None
        measure = _tokens if self.lanes.has_free else _one
        held = sum(measure(r) for _, _, r in self.entries if r.tenant == request.tenant)
        least = 2.0 * (held + measure(request)) / request.share
        return self._latest_of_greediest(measure, least)

    def _latest_of_greediest(
        self, measure: Callable[[Request], int], least: float
    ) -> Request | None:
        """The last request in policy order, but for those that stay, of the tenant with several
        that holds the most, if that is `least` or more."""
        held: dict[str, float] = {}
        latest: dict[str, Request] = {}
        several = set()
        for _, _, request in self.entries:
            name = request.tenant
            if name in held:
                several.add(name)
            held[name] = held.get(name, 0.0) + measure(request) / request.share
            if not preemption_exhausted(request):
                latest[name] = request
        names = [name for name in latest if name in several and held[name] >= least]
        return latest[max(names, key=held.__getitem__)] if names else None

    # -- membership ----------------------------------------------------------------------------

    def seat(self, request: Request, computed: int) -> None:
        """The request takes the lane `lanes.next_free`, on which its blocks are booked already."""
        self.lanes.seat(request)
        request.status = RequestStatus.RUNNING
        request.planned = request.computed = computed
        entry = (*self._key(request), request)
        bisect.insort(self.entries, entry)
        bisect.insort(self._prompts, entry)

    def vacate(self, requests: Sequence[Request]) -> None:
        """They give up their lanes; their blocks are the caller's business."""
        generating = [r.lane for r in requests if r.generating]
        if generating:
            self.generating = self.generating.without(generating)
        for request in requests:
            entry = (*self._key(request), request)
            del self.entries[bisect.bisect_left(self.entries, entry)]
            if not request.generating:
                del self._prompts[bisect.bisect_left(self._prompts, entry)]
            request.generating = False
            self.lanes.leave(request)

    def begin(self, chunk: Chunk, step_id: int) -> None:
        """A prompt row is certain to be launched: its whole blocks can be shared from here on."""
        request, lane = chunk.request, chunk.request.lane
        request.planned = chunk.start + chunk.length
        self._blocks.insert(int32([lane]), self.lanes.tokens, int32([request.planned]), ahead=True)
        if chunk.ends_prompt:
            request.generating = True
            self.lanes.prompt_step[lane] = step_id
            self.lanes.ready_step[lane] = step_id + self._config.lag
            entry = (*self._key(request), request)
            del self._prompts[bisect.bisect_left(self._prompts, entry)]
            self._joining.append(request)

    def join(self) -> None:
        """Those whose prompt ends in the step just launched generate from the next one on."""
        if self._joining:
            self.generating = self.generating.joined_by(self._joining)
            self._joining = []

    # -- what a step computes ------------------------------------------------------------------

    def rows(self, step_id: int, settled: bool, drafts: bool, only: str | None = None) -> Rows:
        """The generating requests that the step takes along, all or (where the token budget is
        smaller than their number) the first in policy order. `settled`: no step is in flight.
        only: of this tenant."""
        rows, lanes = self.generating, self.lanes
        if not rows.requests:
            return rows
        room = lanes.last[rows.lanes] - lanes.planned[rows.lanes]
        eligible = room > 0
        if self._config.lag > 1 and not settled:
            eligible &= lanes.ready_step[rows.lanes] <= step_id
        if only is not None:
            eligible &= np.array([request.tenant == only for request in rows.requests])
        if not eligible.all():
            rows, room = rows.select(np.nonzero(eligible)[0]), room[eligible]
        budget = self._config.max_num_batched_tokens
        if len(rows.requests) > budget:
            by_policy = sorted(range(len(room)), key=lambda i: self._key(rows.requests[i]))
            first = np.array(sorted(by_policy[:budget]))
            rows, room = rows.select(first), room[first]
        if self._lookaheads and drafts:
            rows = self._with_drafts(rows, room, budget - len(rows.requests))
        return rows

    def _with_drafts(self, rows: Rows, room: Int32, budget: int) -> Rows:
        counts = np.zeros(len(room), dtype=np.int32)
        for i, (request, left) in enumerate(zip(rows.requests, room.tolist(), strict=True)):
            most = min(left - 1, budget)
            if most > 0:
                count = max(look(request, most) for look in self._lookaheads)
                counts[i] = min(max(count, 0), most)
                budget -= int(counts[i])
        return rows.with_drafts(counts) if counts.any() else rows

    def chunks(
        self, budget: int, waiting: Mapping[str, tuple[int, float]], only: str | None = None
    ) -> list[Chunk]:
        """The prompt rows of running requests, in policy order. Tenants who want more than the
        budget share it; waiting: what those want (tokens, share) who could start a request now.
        only: of this tenant."""
        chunks: list[Chunk] = []
        parts = self._parts(budget, waiting) if only is None else None
        for _, _, request in self._prompts:
            if only is not None and request.tenant != only:
                continue
            most = budget if parts is None else min(budget, parts[request.tenant])
            length = self.chunk_length(request, request.known - request.planned, most)
            if length > 0:
                chunks.append(Chunk(request, request.planned, length))
                budget -= length
                if parts is not None:
                    parts[request.tenant] -= length
        return chunks

    def _parts(
        self, budget: int, waiting: Mapping[str, tuple[int, float]]
    ) -> dict[str, int] | None:
        """Each tenant's part of the budget; None where nobody is in another's way."""
        wants = dict(waiting)
        for _, _, request in self._prompts:
            tokens, _ = wants.get(request.tenant, (0, 0.0))
            wants[request.tenant] = tokens + request.known - request.planned, request.share
        if len(wants) < 2:
            return None
        return fair_parts(wants, budget)

    @property
    def prompts(self) -> Iterator[Request]:
        """The requests that are in their prompts, in policy order."""
        return (request for _, _, request in self._prompts)

    def chunk_length(self, request: Request, lacking: int, budget: int) -> int:
        """Without chunked prefill prompts go whole, except that one taken up again after a
        preemption may have outgrown any step."""
        if lacking <= budget:
            return lacking
        split = self._config.enable_chunked_prefill or request.num_preemptions
        return max(budget, 0) if split else 0

    def book(self, rows: Rows, chunks: list[Chunk]) -> bool:
        """Blocks for all that these rows compute, or False and none."""
        lanes = rows.lanes
        ends = self.lanes.planned[lanes] + rows.q_len
        if chunks:
            lanes = np.concatenate([lanes, int32([c.request.lane for c in chunks])])
            ends = np.concatenate([ends, int32([c.start + c.length for c in chunks])])
        if self._blocks.slides:
            self._blocks.slide(lanes, self.lanes.planned[lanes] - self.lanes.drafted[lanes])
        return self._blocks.book(lanes, ends)

    def launched(self, rows: Rows, step_id: int) -> None:
        """The rows' positions are on their way."""
        lanes = self.lanes
        lanes.planned[rows.lanes] += rows.q_len
        if rows.drafts:
            lanes.drafted[rows.lanes] += rows.q_len - 1
        if self._config.lag > 1:
            lanes.ready_step[rows.lanes] = step_id + self._config.lag

    def confirm(self, step: Launched, tokens: Int32, n: Int32) -> None:
        """The rows of a step, all of present tenants, gave the first `n` of their line of
        `tokens`. Blocks that are whole now can be shared."""
        lanes = self.lanes
        lanes.accept(step.lanes, tokens, n)
        generating, accepted = step.lanes[: step.num_generating], n[: step.num_generating]
        computed = lanes.computed[generating] + accepted
        lanes.computed[generating] = computed
        if step.drafts:
            q_len = step.q_len[: step.num_generating]
            lanes.planned[generating] -= q_len - accepted
            lanes.drafted[generating] -= q_len - 1
        if self._config.lag > 1:
            ready = lanes.ready_step[step.lanes] == step.step_id + self._config.lag
            lanes.ready_step[step.lanes[ready]] = 0
        whole = computed - self._blocks.inserted[generating] >= self._blocks.block_size
        if whole.any():
            self._blocks.insert(generating[whole], lanes.tokens, computed[whole])
        for chunk in step.chunks:
            request, end = chunk.request, chunk.start + chunk.length
            request.computed = end
            if wants_prompt_logprobs(request):
                delivered = min(end, request.prompt_len - 1)
                request.prompt_logprobs_done = max(request.prompt_logprobs_done, delivered)


def _one(request: Request) -> int:
    return 1


def _tokens(request: Request) -> int:
    return request.known
