"""A reply as a response: at once, as a stream, or in the background."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING

from quire.outputs import Logprob
from quire.server.dialogue import (
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolCallBegin,
    ToolCallDelta,
)
from quire.server.errors import ApiError, as_api_error
from quire.server.logprobs import chat_logprobs
from quire.server.metrics import ServerMetrics
from quire.server.openai_responses.events import Sent
from quire.server.openai_responses.objects import (
    InputTokensDetails,
    OutputTokensDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from quire.server.openai_responses.store import Record, ResponseStore
from quire.server.reply import Reply
from quire.server.thinking import reasoning_tokens

if TYPE_CHECKING:
    from quire.engine.tokenizer import Tokenizer


class ResponseAnswer:
    """Feeds what the model says to a writer.

    record: holds the response; it enters `store` (None: nobody will ask for it) when it is done.
    top_logprobs: None gives no log-probabilities.
    """

    def __init__(
        self,
        reply: Reply,
        record: Record,
        store: ResponseStore | None,
        *,
        tokenizer: Tokenizer,
        top_logprobs: int | None,
    ) -> None:
        self.reply = reply
        self.record = record
        self.store = store
        self.tokenizer = tokenizer
        self.top_logprobs = top_logprobs
        self.writer = record.writer
        self.begun = False
        self.cut = False

    async def whole(self) -> None:
        """Runs it to its end."""
        self.reply.start()
        try:
            async for events in self.reply.batches():
                self._feed(events)
        finally:
            await self.reply.close()
        self._end()

    def start_in_background(self, metrics: ServerMetrics) -> None:
        """Stores it, and lets it run whether anybody waits or not."""
        self.writer.begin()
        if self.store is not None:
            self.store.add(self.record)
        self._tell()
        self.record.task = asyncio.create_task(self._in_background(metrics))

    async def _in_background(self, metrics: ServerMetrics) -> None:
        """Runs it to whatever end it finds, telling those who watch."""
        record, writer = self.record, self.writer
        try:
            self.reply.start()
            async for events in self.reply.batches():
                self._feed(events)
                self._tell()
            self._finish()
        except asyncio.CancelledError:
            writer.cancel()
            raise
        except Exception as error:
            api_error = as_api_error(error)
            metrics.count_error(api_error)
            writer.fail(api_error)
        finally:
            record.task = None
            self._tell()
            await self.reply.close()

    def write(self, events: list[Event]) -> list[Sent]:
        if not self.begun:
            self.writer.begin()
        self._feed(events)
        return self.writer.take()

    def finish(self) -> list[Sent]:
        self._end()
        return self.writer.take()

    def fail(self, error: ApiError) -> list[Sent]:
        self.writer.fail(error)
        return self.writer.take()

    def _tell(self) -> None:
        if self.store is not None:
            self.store.grow(self.record, self.writer.take())

    def _feed(self, events: Iterable[Event]) -> None:
        writer = self.writer
        if not self.begun:
            self.begun = True
            writer.progress()
        for event in events:
            match event:
                case TextDelta():
                    writer.text(event.text, self._logprobs(event.token_ids, event.logprobs))
                case ReasoningDelta():
                    writer.reasoning(event.text)
                case ToolCallBegin():
                    writer.call(event.id, event.name)
                case ToolCallDelta():
                    writer.arguments(event.arguments)
                case Finished():
                    self.cut = event.finish_reason == "length"

    def _end(self) -> None:
        self._finish()
        if self.store is not None:
            self.store.add(self.record)

    def _finish(self) -> None:
        usage = self.reply.usage
        self.writer.finish(
            Usage(
                usage.prompt_tokens,
                InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
                usage.completion_tokens,
                OutputTokensDetails(reasoning_tokens(usage)),
                usage.total_tokens,
            ),
            cut=self.cut,
        )

    def _logprobs(
        self, token_ids: list[int], entries: list[dict[int, Logprob]]
    ) -> list[TokenLogprob]:
        if self.top_logprobs is None:
            return []
        return [
            TokenLogprob(
                entry.token,
                entry.logprob,
                entry.bytes or [],
                [TopLogprob(t.token, t.logprob, t.bytes or []) for t in entry.top_logprobs],
            )
            for entry in chat_logprobs(self.tokenizer, token_ids, entries, self.top_logprobs)
        ]


class Watch:
    """The events of a background response after one of them, as a source of `EventStream`."""

    def __init__(self, record: Record, after: int) -> None:
        self.record = record
        self.after = after

    def start(self) -> None:
        """Nothing to do: it runs by itself."""

    async def ready(self) -> None:
        """Always."""

    async def close(self) -> None:
        """It goes on without those who watch."""

    def batches(self) -> AsyncIterator[list[Sent]]:
        return self.record.watch(self.after)
