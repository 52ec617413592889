"""One budget loop: each step computes some of the tokens that requests still lack.

**States** (`RequestStatus`) and who moves a request between them:

==========  ==========  ==========================================================================
from        to          when
==========  ==========  ==========================================================================
(new)       WAITING     `add`
(new)       PARKED      `add`: a feature is not ready for it, or its leader's prompt is not planned
PARKED      WAITING     `wake`; the leader's prompt is planned; the leader ended or was preempted
WAITING     PARKED      `plan`: a feature brings blocks that the request can start from
WAITING     RUNNING     `plan`: budget, a lane and blocks suffice; tenants by turns (`tenants.py`),
                        a tenant's in policy order
RUNNING     WAITING     `plan`: preempted, the last in policy order of the tenant that holds the
                        most, when blocks run out, or a lane for another tenant; `update`: a
                        feature kept fewer tokens than the device accepted
RUNNING     FINISHED    `update`: a stop token, or the longest length
any         FINISHED    `abort`
==========  ==========  ==========================================================================

While RUNNING a request is in its prompt (`generating` false: the host knows the tokens to compute,
a step takes as many as the budget allows) or generating (the device knows where it stands; a step
takes one position and what drafts there are). Giving up a lane always goes the same way
(`_vacate`): blocks and lane are free at once, because the device runs steps in order, and rows of
the old tenant that are still in flight are recognized by the lane's `lane_epoch` and ignored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from quire.cache import BlockManager, DetachedBlocks
from quire.config import SchedulerConfig
from quire.errors import RequestError
from quire.executor import Capacity
from quire.plan import Admit, StepPlan, StepResult, StopReason
from quire.request import FinishReason, Request, RequestStatus
from quire.scheduler.admission import Admission
from quire.scheduler.feature import Feature
from quire.scheduler.feature_set import FeatureSet
from quire.scheduler.interactive_burst import Courtesy
from quire.scheduler.lanes import Chunk, Launched, Rows
from quire.scheduler.policy import sort_key
from quire.scheduler.progress import SchedulerStats, StepProgress
from quire.scheduler.running import RunningSet
from quire.scheduler.steps import Columns, admit_of
from quire.scheduler.tenants import FairQueue
from quire.scheduler.waiting import WaitingSet


class Scheduler:
    """Decides what each step computes. Not thread-safe; the engine's loop owns it."""

    def __init__(
        self, config: SchedulerConfig, capacity: Capacity, features: Sequence[Feature] = ()
    ) -> None:
        self._config = config
        self.blocks = BlockManager(
            capacity.groups,
            capacity.num_blocks,
            config.max_num_seqs,
            config.max_model_len,
            config.enable_prefix_caching,
        )
        self._features = feature_set = FeatureSet(features)
        self._requests: dict[str, Request] = {}
        key = sort_key(config)
        self._queue = FairQueue(key)
        self._courtesy = Courtesy(config, self._queue)
        self._waiting = WaitingSet(self._queue, feature_set.ready)
        self._prompts_planned: list[Request] = []
        self._running = RunningSet(config, self.blocks, key, feature_set.lookahead)
        self._lanes = self._running.lanes
        self._admission = Admission(
            config,
            self.blocks,
            self._running,
            feature_set.fetch,
            feature_set.reusable,
            full_step=capacity.full_step,
        )
        feature_set.attach(self.blocks, self.wake)
        self._in_flight: deque[Launched] = deque()
        self.last_step: Launched | None = None
        self.last_prompt_step: Launched | None = None
        """The last that computed a part of any prompt; `last_step` is soon another."""
        self._frees: list[int] = []
        self._detached: dict[str, DetachedBlocks] = {}
        self._blocked_head: Request | None = None
        """Next, but without blocks when it was last tried."""
        self._step_id = 0
        self._order = 0
        self._prefix_queries = self._prefix_hits = self._preemptions = self._swapped = 0

    # -- requests come and go ------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Take a new request in. Siblings (n > 1) follow the one they name as `leader`.

        Raises `RequestTooLargeError` if it could not run even alone, `RefusedError` if it does not
        fit a step or a feature refuses it, `RequestError` if it is malformed, `OverloadedError` if
        too many wait already; siblings are not refused for that.
        """
        if request.request_id in self._requests:
            raise RequestError(
                f"there is a running request with the id {request.request_id!r}",
                param="request_id",
                code="duplicate_request_id",
            )
        self._admission.check(request)
        if request.leader is None:
            waiting = len(self._waiting) - self._lanes.num_free
            self._admission.check_room(waiting, self._queue.tokens)
        self._features.admit(request)
        self._order += 1
        request.order = self._order
        self._requests[request.request_id] = request
        self._queue.enter(request)
        self._waiting.place(request)

    def wake(self, request_id: str) -> None:
        """A feature may be ready for a parked request now. Ignored where it is not parked."""
        request = self._requests.get(request_id)
        if request is not None:
            self._waiting.wake(request)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> Request | None:
        """End a request wherever it stands. None if there is none of that id (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.status is RequestStatus.RUNNING:
            self._vacate([request], ended=True)
        else:
            self._waiting.remove(request, RequestStatus.FINISHED)
            self._features.release(request)
        self._finish(request, reason)
        return request

    def _finish(self, request: Request, reason: FinishReason) -> None:
        del self._requests[request.request_id]
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        self._queue.leave(request)
        self._waiting.wake_siblings(request)

    def _preempt(self, request: Request) -> None:
        """Back to the queue; what it knows is recomputed, or found in the tree, or brought back."""
        self._swapped += self._features.preempt(request)
        self._vacate([request], ended=False)
        request.epoch += 1
        request.num_preemptions += 1
        request.planned = request.computed = 0
        self._preemptions += 1
        self._waiting.place(request)
        self._waiting.wake_siblings(request)

    def _vacate(self, requests: Sequence[Request], *, ended: bool) -> None:
        """Give up lanes and blocks."""
        for request in requests:
            valid = request.computed if request.generating else request.planned
            detached = self.blocks.detach(request.lane, request.tokens.view(), valid)
            if self._features.release(request) and ended:
                self._detached[request.request_id] = detached
            else:
                self.blocks.free(detached)
            self._frees.append(request.lane)
            self._queue.stop(request)
        self._running.vacate(requests)

    def free_detached(self, request_id: str) -> None:
        """Free the blocks that a feature's `release` asked to keep. Idempotent."""
        detached = self._detached.pop(request_id, None)
        if detached is not None:
            self.blocks.free(detached)

    # -- a step is planned ---------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to launch until a result or a request comes.
        A plan that is returned must be launched."""
        if len(self._in_flight) >= self._config.steps_in_flight:
            return None
        # Blocks are copied before a step's body, so prompts are shared from the next step on.
        for leader in self._prompts_planned:
            self._waiting.wake_siblings(leader)
        self._prompts_planned = []
        if self._queue.contested:
            victim = self._running.victim_for(self._queue.peek(), self._blocked_head)
            if victim is not None:  # one a step: a burst is let in step by step
                self._preempt(victim)
        guest = self._courtesy.guest(self._next_prompts(), self._step_id)
        plan = None if guest is None else self._plan_for(guest)
        return plan or self._plan_for(None)

    def _next_prompts(self) -> Iterator[Request]:
        """Of which the step could compute something, most probably."""
        yield from self._running.prompts
        request = self._queue.peek() if self._lanes.has_free else None
        if request is not None and request is not self._blocked_head:
            yield request

    def _plan_for(self, only: str | None) -> StepPlan | None:
        """A step for everybody, or for one tenant."""
        preemptions = self._preemptions
        most = self._courtesy.prompt_tokens(only, self._step_id)
        rows, chunks = self._settle(most, only)
        for chunk in chunks:
            self._running.begin(chunk, self._step_id)
        admits: list[Admit] = []
        if self._queue and preemptions == self._preemptions:
            room = self._config.max_num_batched_tokens - int(rows.q_len.sum())
            self._admit(min(room, most) - sum(c.length for c in chunks), chunks, admits, only)
        if not chunks and not rows.requests and (only is not None or not self._has_pending()):
            return None
        return self._launch(rows, chunks, admits)

    def _has_pending(self) -> bool:
        return self._features.pending(not self._in_flight)

    def _settle(self, most: int, only: str | None) -> tuple[Rows, list[Chunk]]:
        """The rows of running requests, with their blocks booked. When blocks run out, drafts go
        first, then the last requests of who holds the most. most: prompt tokens."""
        running, settled = self._running, not self._in_flight
        drafts, budget = True, self._config.max_num_batched_tokens
        able = self._queue.contested and self._lanes.has_free and self._blocked_head is None
        waiting = self._queue.waiting() if able else {}
        while True:
            rows = running.rows(self._step_id, settled, drafts, only)
            chunks = running.chunks(min(budget - int(rows.q_len.sum()), most), waiting, only)
            if running.book(rows, chunks):
                return rows, chunks
            drafts = False
            if rows.drafts:
                continue
            if len(running) > 1:
                self._preempt(running.last(self._queue.contested))
            elif chunks and chunks[0].length > 1:
                most = chunks[0].length // 2
            elif settled and not self._detached and not self.blocks.loading:
                raise RuntimeError("a request that fits the cache found no room in it")
            else:
                return Rows.none(), []

    def _admit(
        self, budget: int, chunks: list[Chunk], admits: list[Admit], only: str | None
    ) -> None:
        """Start waiting requests in their order; the first that does not fit ends it."""
        self._blocked_head = None
        while budget > 0 and self._lanes.has_free:
            if self._admission.enough(chunks, len(self._running) + len(self._queue)):
                return
            request = self._queue.peek()
            if request is None or (only is not None and request.tenant != only):
                return
            tokens = request.tokens.view()
            if self._admission.fetches(request, tokens):
                self._waiting.park()
                continue
            chunk = self._admission.book(request, tokens, budget, self._step_id)
            if chunk is None:
                whole = not self._config.enable_chunked_prefill and request.known > budget
                self._blocked_head = None if whole else request
                return
            self._queue.pop(request)
            self._running.seat(request, chunk.start)
            self._queue.start(request, chunk.start)
            if not (request.num_preemptions or chunk.forked):
                request.num_cached_tokens = chunk.start
                self._prefix_queries += request.known
                self._prefix_hits += chunk.start
            admits.append(admit_of(request, tokens, chunk.start))
            chunks.append(chunk)
            budget -= chunk.length
            self._running.begin(chunk, self._step_id)

    def _launch(self, rows: Rows, chunks: list[Chunk], admits: list[Admit]) -> StepPlan:
        self._running.launched(rows, self._step_id)
        columns = Columns.of(rows, chunks)
        plan = StepPlan(
            step_id=self._step_id,
            lanes=columns.lanes,
            q_len=columns.q_len,
            n_logits=columns.n_logits,
            flags=columns.flags,
            admits=admits,
            frees=self._frees,
            block_appends=self.blocks.take_appends(),
            copies=self.blocks.take_copies(),
        )
        self._features.plan(plan, columns.requests)
        self.last_step = Launched(
            self._step_id,
            columns.requests,
            columns.lanes,
            columns.q_len,
            columns.lane_epoch,
            len(rows.lanes),
            rows.drafts,
            chunks,
        )
        if chunks:
            self.last_prompt_step = self.last_step
        self._in_flight.append(self.last_step)
        self._frees = []
        self._step_id += 1
        self._running.join()
        self._prompts_planned = [c.request for c in chunks if c.request.generating]
        return plan

    # -- a result comes ------------------------------------------------------------------------

    def update(self, result: StepResult) -> StepProgress:
        """Take in the result of the oldest step in flight."""
        step = self._in_flight.popleft()
        if step.step_id != result.step_id:
            raise RuntimeError(f"result of step {result.step_id} came before {step.step_id}'s")
        self._features.transferred(result)
        tokens, n, stop = result.tokens, result.n_tokens, result.stop_reason
        rows = np.arange(len(n), dtype=np.int32)
        live = self._lanes.lane_epoch[step.lanes] == step.lane_epoch
        if not live.all():
            rows = rows[live]
            step, tokens, n, stop = step.select(rows), tokens[rows], n[rows], stop[rows]
        n = np.minimum(n, self._lanes.last[step.lanes] + 1 - self._lanes.known[step.lanes])
        cut = self._features.cut(step, tokens, n)
        self._running.confirm(step, tokens, n)
        full = self._lanes.known[step.lanes] > self._lanes.last[step.lanes]
        ended = full | (stop != StopReason.NONE)
        ended[cut] = False
        finished: list[int] = np.nonzero(ended)[0].tolist()
        if finished:
            self._vacate([step.requests[i] for i in finished], ended=True)
            for i in finished:
                stopped = stop[i] == StopReason.STOP_TOKEN
                reason = FinishReason.STOP if stopped else FinishReason.LENGTH
                self._finish(step.requests[i], reason)
        for i in cut:
            self._preempt(step.requests[i])
        return StepProgress(
            step_id=step.step_id,
            requests=step.requests,
            rows=rows,
            tokens=tokens,
            n_tokens=n,
            stop_reason=stop,
            finished=finished,
            logprobs=result.logprobs,
            prompt_logprobs=result.prompt_logprobs,
            pooled=result.pooled,
        )

    # -- what the engine asks ------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Queued and parked."""
        return len(self._waiting)

    def requests(self) -> Iterable[Request]:
        """All that are not finished, in order of arrival."""
        return self._requests.values()

    @property
    def num_in_flight(self) -> int:
        """Steps planned whose results have not come."""
        return len(self._in_flight)

    @property
    def oldest_in_flight(self) -> int:
        """The step whose result comes next; there must be one."""
        return self._in_flight[0].step_id

    def has_work(self) -> bool:
        """Whether any request is unfinished, or any step or transfer in flight."""
        return bool(self._requests or self._in_flight or self._has_pending())

    def stats(self) -> SchedulerStats:
        usage = self.blocks.usage()
        return SchedulerStats(
            running=self.num_running,
            waiting=self.num_waiting,
            blocks_total=[u.total for u in usage],
            blocks_used=[u.used for u in usage],
            blocks_cached=[u.cached for u in usage],
            blocks_free=[u.free for u in usage],
            prefix_query_tokens=self._prefix_queries,
            prefix_hit_tokens=self._prefix_hits,
            evicted_blocks=self.blocks.evicted,
            copied_blocks=self.blocks.copied,
            preemptions=self._preemptions,
            swapped=self._swapped,
        )

    def reset_prefix_cache(self) -> bool:
        """Forget every prefix that no request runs on; False if some are left."""
        self._features.forget()
        return self.blocks.reset_cache()
