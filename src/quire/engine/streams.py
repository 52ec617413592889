"""Where tokens wait until the stream that they belong to reads them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from quire.arrays import Float32
from quire.engine.messages import StepOutputs
from quire.errors import QuireError
from quire.plan import Logprobs


@dataclass(slots=True)
class StreamDelta:
    """What came for one completion since it was last read."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    reason: str | None = None
    stop_token: int | None = None
    num_cached_tokens: int = 0
    queued: float = 0.0
    pooled: Float32 | None = None


class RequestStream:
    """What came for one request. One reader."""

    def __init__(self) -> None:
        self.news: dict[int, StreamDelta] = {}
        self.prompt_logprobs: list[Logprobs] = []
        self.error: QuireError | None = None
        self.arrived = asyncio.Event()

    def of(self, index: int) -> StreamDelta:
        self.arrived.set()
        news = self.news.get(index)
        if news is None:
            news = self.news[index] = StreamDelta()
        return news

    def fail(self, error: QuireError) -> None:
        self.error = error
        self.arrived.set()


class StreamRouter:
    """The inboxes of all requests. A completion goes by its handle (see `messages`)."""

    def __init__(self) -> None:
        self._inboxes: dict[int, tuple[RequestStream, int]] = {}
        self._handles: dict[str, int] = {}
        self._next_handle = 0

    def open(self, request_id: str, n: int) -> tuple[int, RequestStream]:
        """The handle and inbox of a request with `n` completions."""
        if request_id in self._handles:
            raise QuireError(f"request id {request_id!r} is in use")
        handle, inbox = self._next_handle, RequestStream()
        self._next_handle = (self._next_handle + n) % (2**31 - 1024)
        self._handles[request_id] = handle
        for index in range(n):
            self._inboxes[handle + index] = inbox, index
        return handle, inbox

    def close(self, request_id: str, handle: int, n: int) -> None:
        self._handles.pop(request_id, None)
        for index in range(n):
            self._inboxes.pop(handle + index, None)

    def handle_of(self, request_id: str) -> int | None:
        return self._handles.get(request_id)

    def end(self, handle: int, reason: str) -> None:
        """All completions of a request end."""
        inbox = self._inboxes[handle][0]
        index = 0
        while self._inboxes.get(handle + index, (None,))[0] is inbox:
            inbox.of(index).reason = reason
            index += 1

    def refuse(self, handle: int, error: QuireError) -> None:
        if handle in self._inboxes:
            self._inboxes[handle][0].fail(error)

    def fail(self, error: QuireError) -> None:
        """Nothing will come any more, for anyone."""
        for inbox, _ in self._inboxes.values():
            inbox.fail(error)

    def deliver(self, message: StepOutputs) -> None:
        """To whom it is for; those who have left get nothing."""
        tokens, at = message.tokens.tolist(), 0
        for handle, part in message.prompt_logprobs:
            if handle in self._inboxes:
                self._inboxes[handle][0].prompt_logprobs.append(part)
        for handle, count in zip(message.handles.tolist(), message.counts.tolist(), strict=True):
            news = self._news(handle)
            if news is not None:
                news.tokens += tokens[at : at + count]
            at += count
        for handle, part in message.logprobs:
            if (news := self._news(handle)) is not None:
                news.logprobs.append(part)
        for handle, vector in message.pooled:
            if (news := self._news(handle)) is not None:
                news.pooled = vector
        for first in message.firsts:
            if (news := self._news(first.handle)) is not None:
                news.num_cached_tokens, news.queued = first.num_cached_tokens, first.queued
        for end in message.ends:
            if (news := self._news(end.handle)) is not None:
                news.reason, news.stop_token = end.reason, end.stop_token

    def _news(self, handle: int) -> StreamDelta | None:
        found = self._inboxes.get(handle)
        return None if found is None else found[0].of(found[1])
