"""The requests that hold a lane, and which of their tokens the next step computes."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from quire.arrays import Int32, int32
from quire.cache import BlockManager
from quire.config import SchedulerConfig
from quire.plan import RowFlag
from quire.request import Request, RequestStatus
from quire.scheduler.feature import FeatureSet
from quire.scheduler.lanes import Flags, LaneTable
from quire.scheduler.order import Order
from quire.scheduler.step import (
    DecodeRows,
    Index,
    PrefillChunk,
    StepInFlight,
    wants_prompt_logprobs,
)
from quire.scheduler.waiting import Entry


class RunningSet:
    """Running requests, in policy order, and their lanes.

    Args:
        features: says how many drafts rows verify, and which lanes have what their late rows
            lacked.
        logit_rows: most logit rows of a step.
        drafts: most draft tokens of a row.

    Attributes:
        entries: all running requests.
        generating: rows of the generating requests, in the order in which they began to generate.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        order: Order,
        features: FeatureSet,
        logit_rows: int,
        drafts: int,
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._order = order
        self._features = features
        self._drafts_possible = bool(features.looks_ahead)
        self._logit_rows = logit_rows
        self._drafts = drafts
        self.lanes = LaneTable(config.max_num_seqs, config.max_model_len)
        self.entries: list[Entry] = []
        self._prompts: list[Entry] = []
        self.generating = DecodeRows.empty()
        self._joining: list[Request] = []

    def __len__(self) -> int:
        return len(self.entries)

    # -- membership ----------------------------------------------------------------------------

    def add(self, request: Request, computed: int) -> None:
        """Gives the request the lane `lanes.next_free`, for which its blocks are already booked."""
        self.lanes.assign(request)
        request.status = RequestStatus.RUNNING
        request.planned = request.computed = computed
        entry = (*self._order.key(request), request)
        bisect.insort(self.entries, entry)
        bisect.insort(self._prompts, entry)

    def remove(self, requests: Sequence[Request]) -> None:
        """Takes the requests' lanes back. The caller frees their blocks."""
        generating = [r.lane for r in requests if r.generating]
        if generating:
            self.generating = self.generating.without(generating)
        for request in requests:
            entry = (*self._order.key(request), request)
            del self.entries[bisect.bisect_left(self.entries, entry)]
            if not request.generating:
                del self._prompts[bisect.bisect_left(self._prompts, entry)]
            request.generating = False
            self.lanes.release(request)

    def begin(self, chunk: PrefillChunk, step_id: int) -> None:
        """Records a prompt's row that the next step will compute.

        From then on, other requests can share its whole blocks.
        """
        request, lane = chunk.request, chunk.request.lane
        request.planned = chunk.start + chunk.length
        self._blocks.insert(int32([lane]), self.lanes.tokens, int32([request.planned]), ahead=True)
        if not request.mixed:
            self._blocks.compute(
                lane, self.lanes.tokens[lane], chunk.start, request.planned, request.known
            )
        if chunk.ends_prompt:
            request.generating = True
            self.lanes.prompt_step[lane] = step_id
            self.lanes.ready_step[lane] = step_id + self._config.pipeline_depth
            entry = (*self._order.key(request), request)
            del self._prompts[bisect.bisect_left(self._prompts, entry)]
            self._joining.append(request)

    def join(self) -> None:
        """Moves requests whose prompt ends in the step just launched to the generating rows."""
        if self._joining:
            self.generating = self.generating.joined_by(self._joining)
            self._joining = []

    # -- rows of a step ------------------------------------------------------------------------

    def rows(self, step_id: int, idle: bool, with_drafts: bool) -> DecodeRows:
        """Returns the rows of generating requests that the step computes.

        If not all rows fit the token budget, the first in policy order are returned. With a
        `pipeline_depth` above 1 each step takes its share of the rows, longest waiting first.

        Args:
            idle: whether no step is in flight.
            with_drafts: whether rows may verify draft tokens.
        """
        rows, lanes = self.generating, self.lanes
        if not rows.requests:
            return rows
        room = lanes.last[rows.lanes] - lanes.planned[rows.lanes]
        eligible = room > 0
        if lanes.num_held:
            eligible &= self._may_continue(rows.lanes)
        if self._config.pipeline_depth > 1 and not idle:
            eligible &= lanes.ready_step[rows.lanes] <= step_id
        allowed = self._order.allowed_rows(rows.requests)
        if allowed is not None:
            eligible &= allowed
        if not eligible.all():
            rows, room = rows.select(np.nonzero(eligible)[0]), room[eligible]
        turns = min(self._config.pipeline_depth, self._config.steps_in_flight)
        share = -(-len(self.generating.requests) // turns)
        budget = min(self._config.max_num_batched_tokens, share)
        if len(rows.requests) > budget:
            waits = lanes.ready_step[rows.lanes] * (turns > 1)
            order = [(waits[i], *self._order.key(r), i) for i, r in enumerate(rows.requests)]
            first = np.array(sorted(i for *_, i in sorted(order)[:budget]))
            rows, room = rows.select(first), room[first]
        if lanes.num_held and rows.requests:
            rows, room = self._with_held(rows, room)
        if self._drafts_possible and with_drafts and rows.requests and self._features.drafting:
            rows = self._with_drafts(rows, room)
        return rows

    def _may_continue(self, lanes: Int32) -> Flags:
        """Returns whether each lane is not held or has its late row's inputs by now, bool [n]."""
        table = self.lanes
        free: Flags = ~table.held[lanes] | table.resumed[lanes]
        held = lanes[~free]
        if len(held):
            free[~free] = self._features.inputs_ready(held)
        return free

    def _with_held(self, rows: DecodeRows, room: Int32) -> tuple[DecodeRows, Int32]:
        """Marks the rows of lanes that are held. They have no drafts."""
        held = self.lanes.held[rows.lanes] & ~self.lanes.resumed[rows.lanes]
        if not held.any():
            return rows, room
        flags = rows.flags | int32(held * int(RowFlag.HELD))
        return replace(rows, flags=flags), np.where(held, 1, room)

    def _with_drafts(self, rows: DecodeRows, room: Int32) -> DecodeRows:
        """Adds drafts, as many as the budgets of tokens and of logit rows allow.

        A logit row stays free for each prompt that may end in the step.
        """
        count, lanes = len(rows.requests), self.lanes
        ends = len(self._prompts) + min(lanes.num_free, len(self._order))
        most = min(self._config.max_num_batched_tokens, self._logit_rows - ends) - count
        room = np.minimum(room - 1, min(max(most, 0), self._drafts))
        if not room.any():
            return rows
        counts = cut_evenly(np.minimum(self._features.lookahead(rows.lanes, room), room), most)
        return rows.with_drafts(counts) if counts.any() else rows

    def chunks(self, budget: int, can_start: bool) -> list[PrefillChunk]:
        """Returns the prompt rows of running requests, in policy order.

        Args:
            budget: most tokens of all these rows.
            can_start: whether waiting requests could start in this step, too.
        """
        chunks: list[PrefillChunk] = []
        if not self._prompts:
            return chunks
        prompts = list(self.prompts)
        parts = self._order.split_budget(prompts, budget, can_start)
        for i, request in enumerate(prompts):
            most = budget if parts is None else min(budget, parts[i])
            length = self.chunk_length(request, request.known - request.planned, most)
            if length > 0:
                chunks.append(PrefillChunk(request, request.planned, length))
                budget -= length
        return chunks

    @property
    def prompts(self) -> Iterator[Request]:
        """The requests that are in their prompts, in policy order."""
        return (request for _, _, request in self._prompts)

    def chunk_length(self, request: Request, remaining: int, budget: int) -> int:
        """Returns how many of a prompt's `remaining` tokens to compute in a step.

        Without chunked prefill a prompt is computed whole. After a preemption it may be split,
        because the prompt and the output together may exceed a step.
        """
        length = min(remaining, max(budget, 0))
        if length and self._features.limits_prompts:
            start = request.known - remaining
            length = self._features.prompt_end(request, start, start + length) - start
        split = self._config.enable_chunked_prefill or request.num_preemptions
        return length if split or length == remaining else 0

    def book(self, rows: DecodeRows, chunks: list[PrefillChunk]) -> bool:
        """Books blocks for all tokens of these rows, or returns False and books none."""
        lanes = rows.lanes
        ends = self.lanes.planned[lanes] + rows.q_len
        if chunks:
            lanes = np.concatenate([lanes, int32([c.request.lane for c in chunks])])
            ends = np.concatenate([ends, int32([c.start + c.length for c in chunks])])
        if self._blocks.slides:
            self._blocks.slide(lanes, self.lanes.planned[lanes] - self.lanes.drafted[lanes])
        return self._blocks.book(lanes, ends)

    def launched(self, rows: DecodeRows, step_id: int) -> None:
        """Records that the rows' positions are being computed."""
        lanes = self.lanes
        lanes.planned[rows.lanes] += rows.q_len
        if lanes.num_held:
            lanes.resumed[rows.lanes[(rows.flags & RowFlag.HELD) != 0]] = True
        if rows.drafts:
            lanes.drafted[rows.lanes] += rows.q_len - 1
        if self._config.pipeline_depth > 1:
            lanes.ready_step[rows.lanes] = step_id + self._config.pipeline_depth

    def hold(self, step: StepInFlight, rows: Index) -> None:
        """Holds the lanes of rows that were late: see `LaneTable.hold`."""
        requests = [step.requests[row] for row in rows.tolist()]
        self.lanes.hold(requests, step.step_id)
        generating = self.generating
        if generating.requests:
            epochs = self.lanes.lane_epoch[generating.lanes]
            self.generating = replace(generating, lane_epoch=epochs)

    def confirm(self, step: StepInFlight, tokens: Int32, n: Int32) -> None:
        """Appends each row's new tokens to its request, and makes whole blocks shareable.

        Args:
            step: rows of requests that still run.
            tokens: int32 [R, W].
            n: int32 [R], how many of them each row keeps.
        """
        lanes = self.lanes
        lanes.accept(step.lanes, tokens, n)
        if lanes.num_held:
            lanes.let_go(step.lanes[(step.flags & RowFlag.HELD) != 0])
        generating, accepted = step.lanes[: step.num_generating], n[: step.num_generating]
        computed = lanes.computed[generating] + accepted
        lanes.computed[generating] = computed
        if step.drafts:
            q_len = step.q_len[: step.num_generating]
            lanes.planned[generating] -= q_len - accepted
            lanes.drafted[generating] -= q_len - 1
        if self._config.pipeline_depth > 1:
            ready = lanes.ready_step[step.lanes] == step.step_id + self._config.pipeline_depth
            lanes.ready_step[step.lanes[ready]] = step.step_id
        whole = computed - self._blocks.inserted[generating] >= self._blocks.block_size
        if whole.any():
            self._blocks.insert(generating[whole], lanes.tokens, computed[whole])
        for chunk in step.chunks:
            request, end = chunk.request, chunk.start + chunk.length
            request.computed = end
            if wants_prompt_logprobs(request):
                delivered = min(end, request.prompt_len - 1)
                request.prompt_logprobs_done = max(request.prompt_logprobs_done, delivered)


def cut_evenly(counts: Int32, total: int) -> Int32:
    """Returns counts, int32 [n], cut from the largest down until their sum is at most `total`."""
    level = int(counts.max(initial=0))
    while level > 0 and np.minimum(counts, level).sum() > total:
        level -= 1
    cut = np.minimum(counts, level)
    # What remains of the total is less than one per row that was cut.
    more = np.flatnonzero(counts > cut)[: max(total - int(cut.sum()), 0)]
    cut[more] += 1
    return int32(cut)
