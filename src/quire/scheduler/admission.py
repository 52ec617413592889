"""Admission of requests: on arrival, and from the queue onto a lane."""

from __future__ import annotations

from collections.abc import Sequence

from quire.arrays import Int32
from quire.cache import BlockManager, Match
from quire.config import SchedulerConfig
from quire.errors import OverloadedError, RefusedError, RequestError
from quire.request import Request
from quire.scheduler.feature import FeatureSet
from quire.scheduler.order import QueuePart
from quire.scheduler.running import RunningSet
from quire.scheduler.step import PrefillChunk, wants_prompt_logprobs
from quire.scheduler.waiting import preemption_exhausted

_FEW = 8
"""With at most this many requests, short waits matter more than full steps."""


class Admission:
    """Decides which requests may enter, and with which blocks.

    Args:
        features: may bring blocks for a request to start from, and may limit how many cached tokens
            it uses.
        full_step: see `Capacity`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        running: RunningSet,
        features: FeatureSet,
        *,
        full_step: int,
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._running = running
        self._features = features
        self._full_step = full_step
        self.blocks_missing = False
        """Whether the last `book` found too few blocks."""

    def check(self, request: Request) -> None:
        """Refuses a request that could not run at its longest length, `max_total`.

        Raises:
            RequestError: the prompt is empty, or the request exceeds the longest sequence.
            RefusedError: without chunked prefill, the prompt does not fit a step.
            RequestTooLargeError: the request could not run even alone.
        """
        config = self._config
        if request.prompt_len == 0:
            raise RequestError("the prompt is empty", param="prompt")
        if request.prompt_len >= request.max_total:
            raise RequestError(
                f"a prompt of {request.prompt_len} tokens leaves no room for an answer within "
                f"{request.max_total} tokens",
                param="prompt",
            )
        # A pooled request computes no position after its prompt.
        longest = config.max_model_len + (request.pooling is not None)
        if request.max_total > longest:
            raise RequestError(
                f"the request may reach {request.max_total} tokens, but sequences are limited to "
                f"max_model_len={config.max_model_len}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        chunk = 1
        if not config.enable_chunked_prefill:
            chunk = request.prompt_len
            if chunk > config.max_num_batched_tokens:
                raise RefusedError(
                    f"the prompt has {chunk} tokens, but without chunked prefill it must fit a "
                    f"step of max_num_batched_tokens={config.max_num_batched_tokens} "
                    "(--max-num-batched-tokens)",
                    param="prompt",
                    code="prompt_exceeds_step",
                )
        self._blocks.check_fits(request.max_total - 1, chunk)

    def check_room(self, requests: int, tokens: int, part: QueuePart) -> None:
        """Refuses a request if the queue is full and its tenant already has its share of the queue.

        So a tenant that floods the queue does not keep others out.

        Args:
            requests: number of waiting requests, less the number of free lanes.
            tokens: number of tokens of all waiting requests.
            part: the tenant's part of the queue.

        Raises:
            OverloadedError: the queue is full.
        """
        for waiting, own, most, unit, limit in (
            (requests, part.requests, self._config.max_queue, "requests", "max_queue"),
            (
                tokens,
                part.tokens,
                self._config.max_queue_tokens,
                "prompt tokens",
                "max_queue_tokens",
            ),
        ):
            if most is not None and waiting >= most and own >= most * part.share:
                raise OverloadedError(f"{waiting} {unit} are waiting already ({limit}={most})")

    def enough(self, chunks: Sequence[PrefillChunk], requests: int) -> bool:
        """Whether a step has enough prompts.

        If there are few requests, a full step takes no further prompt, so that the first request
        does not wait for the last.

        Args:
            chunks: the step's prompt rows.
            requests: number of all running and waiting requests.
        """
        return requests <= _FEW and sum(chunk.length for chunk in chunks) >= self._full_step

    def must_wait(self, request: Request, tokens: Int32) -> bool:
        """Whether the request should wait for blocks that a feature brings.

        Args:
            tokens: int32 [known].
        """
        if not self._features.fetches:
            return False
        return self._features.fetch(request, tokens, self._limit(request))

    def _limit(self, request: Request) -> int:
        """Returns how many tokens a request that is about to start may take from the cache."""
        limit = request.known - 1
        if wants_prompt_logprobs(request):
            limit = min(limit, request.prompt_logprobs_done)
        return self._features.reusable(request, limit)

    def book(
        self, request: Request, tokens: Int32, budget: int, step_id: int
    ) -> PrefillChunk | None:
        """Books blocks on the next free lane for all tokens of a waiting request.

        Returns the request's first row, or None if it must wait.

        Args:
            tokens: int32 [known].
            budget: most tokens of the row.
        """
        lane, self.blocks_missing = self._running.lanes.next_free, False
        # Keep one spare block for each running request. Otherwise the new request could be
        # preempted at once.
        spare = len(self._running)
        parent = self._forkable_leader(request, step_id)
        if parent is not None:
            shared = request.prompt_len - 1
            if self._blocks.fork(
                lane, request.namespace, parent.lane, shared, request.known, spare
            ):
                return PrefillChunk(request, shared, 1, forked=True)
        match = self._match(request, tokens)
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
                return PrefillChunk(request, start, length)
            self.blocks_missing = True
            # If no other request runs, a window group has too few blocks for such a long row. A
            # shorter row fits.
            length = 0 if spare else length // 2
        return None

    def _match(self, request: Request, tokens: Int32) -> Match:
        """Returns the longest cached prefix from which the request can go on."""
        limit = self._limit(request)
        match = self._blocks.match(request.namespace, tokens, limit)
        while (kept := self._features.reusable(request, match.length)) < match.length:
            match = self._blocks.match(request.namespace, tokens, kept)
        return match

    def _forkable_leader(self, request: Request, step_id: int) -> Request | None:
        """Returns the sibling whose blocks hold this request's whole prompt before this step."""
        leader = request.leader
        if leader is None or request.num_preemptions or request.prompt_len < 2:
            return None
        if not leader.generating or leader.prompt_len != request.prompt_len:
            return None
        return leader if self._running.lanes.prompt_step[leader.lane] < step_id else None
