"""The scheduler of encoders: every request is one row of one step, and keeps nothing behind it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.plan import Admit, StepPlan, StepResult, StopReason
from quire.request import FinishReason, Request, RequestStatus
from quire.scheduler.delays import PREFILL
from quire.scheduler.progress import StepProgress
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.step import DecodeRows, PrefillChunk, make_admit


class TextScheduler(Scheduler):
    """Fills each step with whole texts, in the order of the queue.

    A request needs a lane for one step, and no blocks. So a step costs little per request.
    """

    _num_running = 0

    @property
    def num_running(self) -> int:
        return self._num_running

    def _plan_step(self, *, reserved: bool) -> StepPlan | None:
        budget = self._config.max_num_batched_tokens
        most = min(budget, self._order.prompt_budget(self._step_id))
        chunks: list[PrefillChunk] = []
        admits: list[Admit] = []
        while self._lanes.has_free:
            waiting = len(self._order)
            if self._admission.enough(chunks, self._num_running + waiting):
                break
            request = self._order.next()
            # A tenant's share may be less than a text, which is then a step of its own.
            if request is None or request.known > (most if chunks else budget):
                break
            self._order.pop(request)
            chunk = PrefillChunk(request, 0, request.known)
            admits.append(self._start(request))
            chunks.append(chunk)
            budget -= chunk.length
            most -= chunk.length
        if not chunks and (reserved or not self._features.pending(not self._in_flight)):
            return None
        return self._launch(DecodeRows.empty(), chunks, admits)

    def _start(self, request: Request) -> Admit:
        """Gives a request a lane for the next step."""
        request.lane, request.lane_epoch = self._lanes.take()
        request.status = RequestStatus.RUNNING
        request.planned = request.known
        self._num_running += 1
        self._order.start(request, 0)
        self.delays.enter(request, PREFILL)
        params = self._features.device_params(request)
        return make_admit(request, request.tokens.view(), 0, params)

    def _release(self, requests: Sequence[Request], *, ended: bool) -> None:
        for request in requests:
            self.delays.settle(request)
            self._features.release(request)
            self._frees.append(request.lane)
            self._lanes.give_back(request.lane)
            request.lane = -1
            self._order.stop(request)
        self._num_running -= len(requests)

    def update(self, result: StepResult) -> StepProgress:
        step = self._in_flight.popleft()
        if step.step_id != result.step_id:
            raise RuntimeError(f"result of step {result.step_id} came before {step.step_id}'s")
        self._features.transferred(result)
        self._read_version_of(step)
        rows = np.flatnonzero(self._lanes.lane_epoch[step.lanes] == step.lane_epoch)
        tokens, n, stop = result.tokens, result.n_tokens, result.stop_reason
        if len(rows) < len(step.requests):  # Some were aborted.
            step, tokens, n, stop = step.select(rows), tokens[rows], n[rows], stop[rows]
        self.delays.result(step, np.zeros(len(rows), dtype=bool))
        self._release(step.requests, ended=True)
        for request, reason in zip(step.requests, stop.tolist(), strict=True):
            broken = reason == StopReason.BROKEN
            self._finish(request, FinishReason.ERROR if broken else FinishReason.LENGTH)
        return StepProgress(
            step_id=step.step_id,
            requests=step.requests,
            rows=rows.astype(np.int32),
            lanes=step.lanes,
            num_generating=0,
            tokens=tokens,
            n_tokens=n,
            stop_reason=stop,
            finished=list(range(len(rows))),
            logprobs=None,
            prompt_logprobs=None,
            pooled=result.pooled,
            version=step.version,
        )
