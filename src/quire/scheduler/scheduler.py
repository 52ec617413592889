"""One budget loop: each step computes some of the tokens that requests still need.

**States** (`RequestStatus`) and who moves a request between them:

==========  ==========  ==========================================================================
from        to          when
==========  ==========  ==========================================================================
(new)       WAITING     `add`
(new)       PARKED      `add`: a feature is not ready for it, or its leader's prompt is not planned
PARKED      WAITING     `wake`; the leader's prompt is planned; the leader ended or was preempted
WAITING     PARKED      `plan`: a feature loads blocks that the request can start from
WAITING     RUNNING     `plan`: budget, a lane and blocks suffice; in the queue's order (`order.py`)
RUNNING     WAITING     `plan`: preempted, if blocks run out or another tenant is due the lane
                        (`Order.victim`, `victim_for`); `update`: a feature kept fewer tokens than
                        the device accepted
RUNNING     FINISHED    `update`: a stop token, or the longest length
any         FINISHED    `abort`
==========  ==========  ==========================================================================

While RUNNING, a request is in its prompt or generating. In its prompt, the host knows the tokens to
compute, and a step takes as many as the budget allows. While a request generates, only the device
knows its position, and a step takes one position and the drafts.

A request always gives up its lane in the same way (`_release`). Its blocks and its lane are free at
once, because the device runs steps in order. Rows of the request that are still in flight have an
older `lane_epoch`, and their results are ignored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from quire.arrays import Int32, int32
from quire.cache import BlockManager, DetachedBlocks
from quire.config import SchedulerConfig
from quire.errors import ConfigError, RequestError
from quire.executor import Capacity
from quire.plan import Admit, StepPlan, StepResult, StopReason
from quire.request import FinishReason, Request, RequestStatus
from quire.scheduler.admission import Admission
from quire.scheduler.delays import DECODE, PREEMPTED, PREFILL, DelayClock
from quire.scheduler.feature import Feature, FeatureSet
from quire.scheduler.order import Order
from quire.scheduler.progress import SchedulerStats, StepProgress
from quire.scheduler.running import RunningSet
from quire.scheduler.step import DecodeRows, Index, PrefillChunk, StepInFlight, make_admit
from quire.scheduler.waiting import WaitingSet

_REASONS = {
    int(StopReason.STOP_TOKEN): FinishReason.STOP,
    int(StopReason.BROKEN): FinishReason.ERROR,
}


class Scheduler:
    """Decides what each step computes. Not thread-safe; the engine's loop owns it.

    Args:
        order: which requests come first; `Order(config)` by default.

    Attributes:
        delays: notes what delays each request.
        last_step: the last step that was planned, or None.
        last_prompt_step: the last step that computed a part of any prompt, or None.
        paused: whether steps have no rows. Requests are accepted, and keep their lanes.
        version: number of updates of the weights (`change_weights`).
        weights: id of the last update, "" before the first.

    Raises:
        ConfigError: a feature proposes drafts but the executor verifies none, or the executor
            samples fewer rows than there are lanes.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        capacity: Capacity,
        features: Sequence[Feature] = (),
        order: Order | None = None,
    ) -> None:
        self._config = config
        self._features = FeatureSet(features)
        logit_rows = _logit_rows(config, capacity, self._features)
        self.blocks = BlockManager(
            capacity.groups,
            capacity.num_blocks,
            config.max_num_seqs,
            config.max_model_len,
            config.enable_prefix_caching,
        )
        self._requests: dict[str, Request] = {}
        self._order = Order(config) if order is None else order
        self.delays = DelayClock(config.max_num_seqs)
        self._waiting = WaitingSet(self._order, self._features.unready, self.delays)
        self._prompts_planned: list[Request] = []
        self._running = RunningSet(
            config, self.blocks, self._order, self._features, logit_rows, capacity.drafts
        )
        self._lanes = self._running.lanes
        self._admission = Admission(
            config,
            self.blocks,
            self._running,
            self._features,
            full_step=capacity.full_step,
        )
        self._features.attach(self.blocks, self.wake)
        self._in_flight: deque[StepInFlight] = deque()
        self.last_step: StepInFlight | None = None
        self.last_prompt_step: StepInFlight | None = None
        self.paused = False
        self.version = self._read_version = 0
        self.weights = ""
        self._frees: list[int] = []
        self._detached: dict[str, DetachedBlocks] = {}
        self._blocked_head: Request | None = None
        """The next request, if it found no blocks when it was last tried."""
        self._step_id = 0
        self._arrivals = 0
        self._prefix_queries = self._prefix_hits = self._preemptions = self._swapped = 0
        self._late_rows = 0

    def add_feature(self, feature: Feature) -> None:
        """Adds a feature to a scheduler that runs, from the next request on.

        Raises:
            ConfigError: the feature proposes drafts, but no feature did at the start.
        """
        if feature.proposes_drafts and not self._features.looks_ahead:
            raise ConfigError(
                f"{type(feature).__name__} proposes drafts, so it must be known when the scheduler "
                "starts"
            )
        self._features.add(feature)
        feature.attach(self.blocks, self.wake)

    # -- requests ------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Accepts a new request. Siblings (n > 1) come after the request that is their `leader`.

        Raises:
            RequestTooLargeError: the request could not run even alone.
            RefusedError: the request does not fit a step, or a feature refuses it.
            RequestError: the request is malformed.
            OverloadedError: too many requests are waiting. Siblings are accepted nevertheless.
        """
        if request.request_id in self._requests:
            raise RequestError(
                f"there is a running request with the id {request.request_id!r}",
                param="request_id",
                code="duplicate_request_id",
            )
        request.weights = self.weights
        self._order.check(request)
        self._admission.check(request)
        if request.leader is None:
            waiting = len(self._waiting) - self._lanes.num_free
            part = self._order.queue_part(request)
            self._admission.check_room(waiting, self._order.tokens, part)
        self._features.admit(request)
        self._order.arrive(request)
        self._arrivals += 1
        request.order = self._arrivals
        self._requests[request.request_id] = request
        self._waiting.place(request)

    def wake(self, request_id: str) -> None:
        """Asks the features again about a parked request. Does nothing if it is not parked."""
        request = self._requests.get(request_id)
        if request is not None:
            self._waiting.wake(request)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> Request | None:
        """Ends a request in any state. Returns it, or None if it is unknown or has ended."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.status is RequestStatus.RUNNING:
            self._release([request], ended=True)
        else:
            self._waiting.remove(request, RequestStatus.FINISHED)
            self._features.release(request)
        self._finish(request, reason)
        return request

    def _finish(self, request: Request, reason: FinishReason) -> None:
        del self._requests[request.request_id]
        request.end_version(self._read_version)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        self.delays.enter(request, "")
        self._order.finish(request)
        self._features.finish(request)
        self._waiting.wake_siblings(request)

    def change_weights(self, weights: str, *, retract: bool) -> None:
        """Records that all steps from the next one on compute with other weights.

        Nothing is evicted: KV of earlier steps has another namespace.

        Args:
            weights: random id of the update.
            retract: whether running requests start over, and compute their tokens again. Otherwise
                they go on from the KV that they have. A request whose last row was late starts over
                in any case, because its hidden state is from the weights before.
        """
        self._features.weights_changed()
        for _, _, request in list(self._running.entries):
            if retract or self._lanes.held[request.lane]:
                self._start_over(request)
            else:
                request.mixed = True
                self.blocks.close(int32([request.lane]))
        self.version += 1
        self.weights = weights
        for request in self._requests.values():
            if request.status is not RequestStatus.RUNNING:
                request.weights = weights

    def retract(self) -> None:
        """Makes all running requests start over. They keep their tokens, and give up their KV."""
        for _, _, request in list(self._running.entries):
            self._start_over(request)

    def _start_over(self, request: Request) -> None:
        """Preempts a request whose KV is of no more use. That does not count as a preemption."""
        before = request.num_preemptions
        request.mixed = True
        self._preempt(request)
        request.num_preemptions = max(1, before)
        self._preemptions -= 1

    def _preempt(self, request: Request) -> None:
        """Puts a running request back into the queue.

        When it runs again, its tokens come from the prefix tree or from a feature, or are computed
        again.
        """
        if not request.mixed:
            self._swapped += self._features.preempt(request)
        self._release([request], ended=False)
        request.weights, request.mixed = self.weights, False
        request.num_preemptions += 1
        request.planned = request.computed = 0
        self._preemptions += 1
        self._waiting.place(request)
        self._waiting.wake_siblings(request)

    def _release(self, requests: Sequence[Request], *, ended: bool) -> None:
        """Frees lanes and blocks."""
        for request in requests:
            self.delays.settle(request)
            valid = request.computed if request.generating else request.planned
            # The recurrent state of a held lane is one position further.
            exact = valid == request.planned and not self._lanes.held[request.lane]
            tokens = None if request.mixed else request.tokens.view()
            detached = self.blocks.detach(request.lane, tokens, valid, exact=exact)
            if self._features.release(request) and ended:
                self._detached[request.request_id] = detached
            else:
                self.blocks.free(detached)
            self._frees.append(request.lane)
            self._order.stop(request)
        self._running.remove(requests)

    def free_detached(self, request_id: str) -> None:
        """Frees the blocks that a feature's `release` asked to keep. Idempotent."""
        detached = self._detached.pop(request_id, None)
        if detached is not None:
            self.blocks.free(detached)

    # -- planning ------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Returns the next step, which the caller must launch.

        Returns None if there is nothing to launch until a result or a request comes.
        """
        if len(self._in_flight) >= self._config.steps_in_flight:
            return None
        # Blocks are copied before a step's body, so prompts are shared from the next step on.
        for leader in self._prompts_planned:
            self._waiting.wake_siblings(leader)
        self._prompts_planned = []
        if self.paused:
            if self._features.pending(not self._in_flight):
                return self._launch(DecodeRows.empty(), [], [])
            return None
        victim = self._order.victim_for(
            self._running.entries, self._lanes.has_free, self._blocked_head
        )
        if victim is not None:  # One per step, so that a burst is admitted step by step.
            self._preempt(victim)
        plan = None
        if self._order.reserve_step(self._next_prompts(), self._step_id):
            plan = self._plan_step(reserved=True)
            self._order.open_step()
        return plan or self._plan_step(reserved=False)

    def _next_prompts(self) -> Iterator[Request]:
        """Yields the requests whose prompts the step will probably compute."""
        yield from self._running.prompts
        request = self._order.next() if self._lanes.has_free else None
        if request is not None and request is not self._blocked_head:
            yield request

    def _plan_step(self, *, reserved: bool) -> StepPlan | None:
        """Returns a step, or None if it would be empty.

        Args:
            reserved: whether `Order.reserve_step` reserved the step for one tenant.
        """
        preemptions = self._preemptions
        most = self._order.prompt_budget(self._step_id)
        rows, chunks = self._running_rows(most)
        for chunk in chunks:
            self._running.begin(chunk, self._step_id)
        admits: list[Admit] = []
        if len(self._order) and preemptions == self._preemptions:
            room = self._config.max_num_batched_tokens - int(rows.q_len.sum())
            self._start_waiting(min(room, most) - sum(c.length for c in chunks), chunks, admits)
        empty = not chunks and not rows.requests
        if empty and (reserved or not self._features.pending(not self._in_flight)):
            return None
        return self._launch(rows, chunks, admits)

    def _running_rows(self, most: int) -> tuple[DecodeRows, list[PrefillChunk]]:
        """Chooses the rows of running requests and books their blocks.

        When blocks run out, drafts are dropped first. Then requests are preempted (`Order.victim`).

        Args:
            most: most prompt tokens.
        """
        running, idle = self._running, not self._in_flight
        with_drafts, budget = True, self._config.max_num_batched_tokens
        can_start = self._lanes.has_free and self._blocked_head is None
        while True:
            rows = running.rows(self._step_id, idle, with_drafts)
            chunks = running.chunks(min(budget - int(rows.q_len.sum()), most), can_start)
            if running.book(rows, chunks):
                return rows, chunks
            with_drafts = False
            if rows.drafts:
                continue
            if len(running) > 1:
                self._preempt(self._order.victim(running.entries))
            elif chunks and chunks[0].length > 1:
                most = chunks[0].length // 2
            elif idle and not self._detached and not self.blocks.loading:
                raise RuntimeError("a running request fits the KV cache but found no free blocks")
            else:
                return DecodeRows.empty(), []

    def _start_waiting(self, budget: int, chunks: list[PrefillChunk], admits: list[Admit]) -> None:
        """Starts waiting requests in their order, up to the first that does not fit.

        Args:
            budget: most prompt tokens.
            chunks: the step's prompt rows. New rows are appended.
            admits: the step's admissions. New admissions are appended.
        """
        self._blocked_head = None
        while budget > 0 and self._lanes.has_free:
            if self._admission.enough(chunks, len(self._running) + len(self._order)):
                return
            request = self._order.next()
            if request is None:
                return
            tokens = request.tokens.view()
            if self._admission.must_wait(request, tokens):
                self._waiting.park(request)
                continue
            chunk = self._admission.book(request, tokens, budget, self._step_id)
            if chunk is None:
                self._blocked_head = request if self._admission.blocks_missing else None
                return
            self._order.pop(request)
            self._running.add(request, chunk.start)
            self._order.start(request, chunk.start)
            self.delays.enter(request, PREEMPTED if request.num_preemptions else PREFILL)
            if not (request.num_preemptions or chunk.forked):
                request.num_cached_tokens = chunk.start
                self._prefix_queries += request.known
                self._prefix_hits += chunk.start
            params = self._features.device_params(request)
            admits.append(make_admit(request, tokens, chunk.start, params))
            chunks.append(chunk)
            budget -= chunk.length
            self._running.begin(chunk, self._step_id)

    def _launch(
        self, rows: DecodeRows, chunks: list[PrefillChunk], admits: list[Admit]
    ) -> StepPlan:
        self._running.launched(rows, self._step_id)
        step = StepInFlight.join(self._step_id, rows, chunks)
        step.version = self.version
        plan = StepPlan(
            step_id=self._step_id,
            lanes=step.lanes,
            q_len=step.q_len,
            n_logits=step.n_logits,
            flags=step.flags,
            admits=admits,
            frees=self._frees,
            block_appends=self.blocks.take_appends(),
            copies=self.blocks.take_copies(),
            skew=1.0 if chunks else self._lanes.skew(step.lanes),
        )
        self._features.plan(plan, step.requests)
        self.delays.launched(step)
        self._in_flight.append(step)
        self.last_step = step
        if chunks:
            self.last_prompt_step = step
        self._frees = []
        self._step_id += 1
        self._running.join()
        self._prompts_planned = [c.request for c in chunks if c.request.generating]
        return plan

    # -- results -------------------------------------------------------------------------------

    def update(self, result: StepResult) -> StepProgress:
        """Records the result of the oldest step in flight, and returns it by request."""
        step = self._in_flight.popleft()
        if step.step_id != result.step_id:
            raise RuntimeError(f"result of step {result.step_id} came before {step.step_id}'s")
        self._features.transferred(result)
        self._read_version_of(step)
        tokens, n, stop = result.tokens, result.n_tokens, result.stop_reason
        rows = np.arange(len(n), dtype=np.int32)
        live = self._lanes.lane_epoch[step.lanes] == step.lane_epoch
        if not live.all():
            rows = rows[live]
            step, tokens, n, stop = step.select(rows), tokens[rows], n[rows], stop[rows]
        n = np.minimum(n, self._lanes.last[step.lanes] + 1 - self._lanes.known[step.lanes])
        late = stop == StopReason.LATE
        any_late = bool(late.any())
        self.delays.result(step, late)
        if any_late:
            self._features.late(*self._dropped(step, np.flatnonzero(late)))
            stop = np.where(late, int(StopReason.NONE), stop)
        if step.drafts:
            own = np.arange(step.num_generating)
            if any_late:
                own = own[~late[own]]
            for verified in self._features.verified:
                verified(step.lanes[own], step.q_len[own] - 1, n[own])
        cut = self._features.cut(step, tokens, n)
        self._running.confirm(step, tokens, n)
        if any_late:
            self._running.hold(step, np.flatnonzero(late))
        for i in range(step.num_generating, len(n)):
            if n[i]:
                self.delays.enter(step.requests[i], DECODE)
        finished = self._end(step, stop, cut)
        for i in cut:
            self._preempt(step.requests[i])
        if any_late and step.version != self.version:
            self._drop_hidden_states(step, np.flatnonzero(late))
        return StepProgress(
            step_id=step.step_id,
            requests=step.requests,
            rows=rows,
            lanes=step.lanes,
            num_generating=step.num_generating,
            tokens=tokens,
            n_tokens=n,
            stop_reason=stop,
            finished=finished,
            logprobs=result.logprobs,
            prompt_logprobs=result.prompt_logprobs,
            drawn=result.drawn,
            experts=result.experts,
            pooled=result.pooled,
            version=step.version,
        )

    def _read_version_of(self, step: StepInFlight) -> None:
        """Notes the version of the weights that gave a step's tokens, before they are added."""
        if step.version != self._read_version:
            for request in self._requests.values():
                request.end_version(self._read_version)
            self._read_version = step.version

    def _drop_hidden_states(self, step: StepInFlight, rows: Index) -> None:
        """Makes requests start over whose hidden states, kept for late rows, are from weights that
        have changed since."""
        for row in rows.tolist():
            if step.requests[row].status is RequestStatus.RUNNING:
                self._start_over(step.requests[row])

    def _dropped(self, step: StepInFlight, late: Index) -> tuple[Int32, Int32, Int32]:
        """Counts rows that were late.

        Returns what `Feature.late` receives.
        """
        self._late_rows += len(late)
        lanes, epochs = step.lanes[late], step.lane_epoch[late]
        rows = int32(late < step.num_generating)
        tokens = step.q_len[late] * rows
        for later in self._in_flight:
            for i, (lane, epoch) in enumerate(zip(lanes.tolist(), epochs.tolist(), strict=True)):
                of_lane = (later.lanes == lane) & (later.lane_epoch == epoch)
                rows[i] += of_lane.sum()
                tokens[i] += later.q_len[of_lane].sum()
        return lanes, rows, tokens

    def _end(self, step: StepInFlight, stop: Int32, cut: list[int]) -> list[int]:
        """Ends requests that ended on the device or have reached their longest length.

        Returns their rows.

        Args:
            stop: int32 [R], a `StopReason` each.
            cut: rows of which a feature removed tokens; their requests continue.
        """
        full = self._lanes.known[step.lanes] > self._lanes.last[step.lanes]
        ended = full | (stop != StopReason.NONE)
        ended[cut] = False
        finished: list[int] = np.nonzero(ended)[0].tolist()
        if finished:
            # After a stop token the device computes no more rows of the lane.
            stopped = step.lanes[ended & (stop == StopReason.STOP_TOKEN)]
            self._lanes.planned[stopped] = self._lanes.computed[stopped]
            self._release([step.requests[i] for i in finished], ended=True)
            for i in finished:
                self._finish(step.requests[i], _REASONS.get(int(stop[i]), FinishReason.LENGTH))
        return finished

    # -- state ---------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that are queued or parked."""
        return len(self._waiting)

    def requests(self) -> Iterable[Request]:
        """Returns all unfinished requests, in order of arrival."""
        return self._requests.values()

    @property
    def num_in_flight(self) -> int:
        """Planned steps whose results have not come."""
        return len(self._in_flight)

    def has_work(self) -> bool:
        """Whether any request is unfinished, or any step or transfer in flight."""
        return bool(self._requests or self._in_flight or self._features.pending(True))

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
            late_rows=self._late_rows,
            delay_seconds=dict(self.delays.totals),
        )

    def reset_prefix_cache(self) -> bool:
        """Forgets every prefix that no request uses; returns False if some are left."""
        self._features.forget()
        return self.blocks.reset_cache()


def _logit_rows(config: SchedulerConfig, capacity: Capacity, features: FeatureSet) -> int:
    """Returns the most logit rows of a step.

    Raises:
        ConfigError: see `Scheduler`.
    """
    if features.looks_ahead and not capacity.drafts:
        names = ", ".join(type(feature).__name__ for feature in features.looks_ahead)
        raise ConfigError(
            f"{names} proposes draft tokens, but this executor verifies none (Capacity.drafts=0)"
        )
    if capacity.logit_rows is None:
        return config.max_num_seqs
    if capacity.logit_rows < config.max_num_seqs:
        raise ConfigError(
            f"the executor samples {capacity.logit_rows} rows a step, fewer than max_num_seqs="
            f"{config.max_num_seqs}",
            "max_num_seqs",
        )
    return capacity.logit_rows
