"""Admission of requests: on arrival, and from the queue onto a lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.arrays import Int32
from quire.cache import BlockManager
from quire.config import SchedulerConfig
from quire.errors import OverloadedError, RefusedError, RequestError
from quire.request import Request
from quire.scheduler.lanes import Chunk, wants_prompt_logprobs
from quire.scheduler.order import QueuePart
from quire.scheduler.running import RunningSet
from quire.scheduler.waiting import preemption_exhausted

_FEW = 8
"""Up to this many requests, each one's wait counts for more than how full a step is."""


class Admission:
    """Decides which requests may enter, and with which blocks. full_step: see `Capacity`."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        running: RunningSet,
        fetches: Sequence[Callable[[Request, Int32, int], bool]],
        reusables: Sequence[Callable[[Request, int], int]] = (),
        *,
        full_step: int,
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._running = running
        self._fetches = fetches
        self._reusables = reusables
        self._full_step = full_step

    def check(self, request: Request) -> None:
        """Refuses a request that can never run, counting all it may need at `max_total`."""
        config = self._config
        if not 0 < request.prompt_len < request.max_total:
            raise RequestError(
                f"a prompt of {request.prompt_len} tokens leaves no room for an answer within "
                f"{request.max_total} tokens, or is empty",
                param="prompt",
            )
        if request.max_total > config.max_model_len:
            raise RequestError(
                f"the request may reach {request.max_total} tokens, but sequences are limited to "
                f"{config.max_model_len}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        chunk = 1
        if not config.enable_chunked_prefill:
            chunk = request.prompt_len
            if chunk > config.max_num_batched_tokens:
                raise RefusedError(
                    f"the prompt has {chunk} tokens, but without chunked prefill it must fit a "
                    f"step of {config.max_num_batched_tokens} (--max-num-batched-tokens)",
                    param="prompt",
                    code="prompt_exceeds_step",
                )
        self._blocks.check_fits(request.max_total - 1, chunk)

    def check_room(self, requests: int, tokens: int, part: QueuePart) -> None:
        """Refuses a request if the queue is full, and its tenant has its share of it.

        A tenant that floods the queue so keeps no other one out.

        Args:
            requests: those waiting, without the ones that free lanes will take.
            tokens: of all that wait.
        """
        for waiting, own, most, what in (
            (requests, part.requests, self._config.max_queue, "requests"),
            (tokens, part.tokens, self._config.max_queue_tokens, "prompt tokens"),
        ):
            if most is not None and waiting >= most and own >= most * part.share:
                raise OverloadedError(f"{waiting} {what} are waiting already")

    def enough(self, chunks: Sequence[Chunk], requests: int) -> bool:
        """Whether a step should take on no more prompts. If a few arrive together, each step takes
        one or as many as fill it, so that the first does not wait for the last. requests: their
        number in all."""
        return requests <= _FEW and sum(chunk.length for chunk in chunks) >= self._full_step

    def fetches(self, request: Request, tokens: Int32) -> bool:
        """Whether a feature is bringing blocks that a waiting request should wait for. tokens:
        int32 [known]."""
        if not self._fetches:
            return False
        limit = self._limit(request)
        return any(fetch(request, tokens, limit) for fetch in self._fetches)

    def _limit(self, request: Request) -> int:
        """Returns how many tokens a request that is about to start may take from the cache."""
        limit = request.known - 1
        if wants_prompt_logprobs(request):
            limit = min(limit, request.prompt_logprobs_done)
        for reusable in self._reusables:
            limit = min(limit, reusable(request, limit))
        return limit

    def book(self, request: Request, tokens: Int32, budget: int, step_id: int) -> Chunk | None:
        """Books blocks on the next free lane for all tokens of a waiting request; returns its first
        row, or None if it must wait. tokens: int32 [known]."""
        lane = self._running.lanes.next_free
        # One spare block for each running request, so that the new one is not the next victim.
        spare = len(self._running)
        parent = self._forkable_leader(request, step_id)
        if parent is not None:
            shared = request.prompt_len - 1
            if self._blocks.fork(
                lane, request.namespace, parent.lane, shared, request.known, spare
            ):
                return Chunk(request, shared, 1, forked=True)
        match = self._blocks.match(request.namespace, tokens, self._limit(request))
        start = match.length
        length = self._running.chunk_length(request, request.known - start, budget)
        while length > 0:
            if self._blocks.admit(
                lane,
                request.namespace,
                match,
                computed=start,
                chunk_end=start + length,
                known=request.max_total - 1 if preemption_exhausted(request) else request.known,
                spare=spare,
            ):
                return Chunk(request, start, length)
            # Alone, a prompt may still be too long for a window group; shorter rows are not.
            length = 0 if spare else length // 2
        return None

    def _forkable_leader(self, request: Request, step_id: int) -> Request | None:
        """Returns the sibling whose blocks hold this request's whole prompt before this step."""
        leader = request.leader
        if leader is None or request.num_preemptions or request.prompt_len < 2:
            return None
        if not leader.generating or leader.prompt_len != request.prompt_len:
            return None
        return leader if self._running.lanes.prompt_step[leader.lane] < step_id else None
