"""Streams of the output of running requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from quire.arrays import Float32
from quire.engine.loop.messages import StepOutputs
from quire.errors import QuireError
from quire.outputs import VersionRun
from quire.plan import ChosenExperts, DrawnTokens, Logprobs


@dataclass(slots=True)
class PromptVector:
    """A vector that the engine made of a prompt.

    Attributes:
        values: float32 [hidden size].
        queued: seconds until the prompt's first step.
    """

    values: Float32
    prompt_token_ids: list[int]
    num_cached_tokens: int
    queued: float


@dataclass(slots=True)
class TokenDelta:
    """One completion's unread tokens, as the engine sent them.

    `CompletionUpdate` is made from it, and has the tokens' text.

    Attributes:
        tokens: token ids.
        logprobs: their log-probabilities, if the request asks for them.
        drawn: how they were drawn, if the request asks for it.
        reason: the finish reason, once the completion has ended.
        stop_token: the stop token that ended it.
        num_cached_tokens: prompt tokens from the prefix cache, with the first tokens only.
        queued: seconds until the request's first step, with the first tokens only.
        delays: see `RequestTimes`; with the first tokens and at the end only.
        pooled: float32 [hidden size], for a request for an embedding.
        versions: versions of the weights that gave the tokens; empty for version 0.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    drawn: list[DrawnTokens] = field(default_factory=list)
    reason: str | None = None
    stop_token: int | None = None
    num_cached_tokens: int = 0
    queued: float = 0.0
    delays: dict[str, float] = field(default_factory=dict)
    pooled: Float32 | None = None
    versions: list[VersionRun] = field(default_factory=list)

    def add(self, tokens: list[int], version: int) -> None:
        """Adds tokens that a version of the weights gave."""
        if version:
            if self.tokens and not self.versions:
                self.versions.append((0, len(self.tokens)))
            self.versions.append((version, len(tokens)))
        self.tokens += tokens


class RequestStream:
    """Unread output of one request, for one reader.

    Attributes:
        deltas: unread tokens, by index of the completion.
        experts: unread experts, each with the index of its completion.
        error: the error that ended the request; None: no error.
        arrived: an event that is set while there is something to read.
    """

    def __init__(self) -> None:
        self.deltas: dict[int, TokenDelta] = {}
        self.prompt_logprobs: list[Logprobs] = []
        self.experts: list[tuple[int, ChosenExperts]] = []
        self.error: QuireError | None = None
        self.arrived = asyncio.Event()

    def delta(self, index: int) -> TokenDelta:
        """Returns a completion's delta, to which the caller adds tokens."""
        self.arrived.set()
        delta = self.deltas.get(index)
        if delta is None:
            delta = self.deltas[index] = TokenDelta()
        return delta

    def take(self) -> dict[int, TokenDelta]:
        """Returns the unread deltas, which then count as read."""
        deltas, self.deltas = self.deltas, {}
        return deltas

    def fail(self, error: QuireError) -> None:
        self.error = error
        self.arrived.set()


class StreamRouter:
    """Routes the engine's outputs to requests' streams by handle (see `messages`)."""

    def __init__(self) -> None:
        self._streams: dict[int, tuple[RequestStream, int]] = {}
        self._handles: dict[str, int] = {}
        self._next_handle = 0

    def open(self, request_id: str, n: int) -> tuple[int, RequestStream]:
        """Returns the handle and stream of a new request with `n` completions."""
        if request_id in self._handles:
            raise QuireError(f"request id {request_id!r} is in use")
        handle, stream = self._next_handle, RequestStream()
        self._next_handle = (self._next_handle + n) % (2**31 - 1024)
        self._handles[request_id] = handle
        for index in range(n):
            self._streams[handle + index] = stream, index
        return handle, stream

    def close(self, request_id: str, handle: int, n: int) -> None:
        self._handles.pop(request_id, None)
        for index in range(n):
            self._streams.pop(handle + index, None)

    def handle_of(self, request_id: str) -> int | None:
        return self._handles.get(request_id)

    def end(self, handle: int, reason: str) -> None:
        """Ends all completions of a request."""
        stream = self._streams[handle][0]
        index = 0
        while self._streams.get(handle + index, (None,))[0] is stream:
            stream.delta(index).reason = reason
            index += 1

    def refuse(self, handle: int, error: QuireError) -> None:
        if handle in self._streams:
            self._streams[handle][0].fail(error)

    def fail_all(self, error: QuireError) -> None:
        for stream, _ in self._streams.values():
            stream.fail(error)

    def deliver(self, message: StepOutputs) -> None:
        """Adds a step's outputs to their streams. Outputs of closed requests are dropped."""
        tokens, at = message.tokens.tolist(), 0
        if message.prompt_logprobs or message.experts:
            self._deliver_positions(message)
        for handle, count in zip(message.handles.tolist(), message.counts.tolist(), strict=True):
            delta = self._delta(handle)
            if delta is not None:
                delta.add(tokens[at : at + count], message.version)
            at += count
        for name in ("logprobs", "drawn"):
            for handle, part in getattr(message, name):
                if (delta := self._delta(handle)) is not None:
                    getattr(delta, name).append(part)
        for handle, vector in message.pooled:
            if (delta := self._delta(handle)) is not None:
                delta.pooled = vector
        for start in message.starts:
            if (delta := self._delta(start.handle)) is not None:
                delta.num_cached_tokens, delta.queued = start.num_cached_tokens, start.queued
                delta.delays = start.delays
        for end in message.ends:
            if (delta := self._delta(end.handle)) is not None:
                delta.reason, delta.stop_token = end.reason, end.stop_token
                delta.delays = end.delays

    def _deliver_positions(self, message: StepOutputs) -> None:
        """Adds what belongs to positions of texts, which may come without tokens."""
        for handle, part in message.prompt_logprobs:
            if handle in self._streams:
                self._streams[handle][0].prompt_logprobs.append(part)
        for handle, experts in message.experts:
            if handle in self._streams:
                stream, index = self._streams[handle]
                stream.experts.append((index, experts))

    def _delta(self, handle: int) -> TokenDelta | None:
        found = self._streams.get(handle)
        return None if found is None else found[0].delta(found[1])
