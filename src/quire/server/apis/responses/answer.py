"""Responses from chat generations: at once, as a stream, or in the background."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING

from quire.outputs import Logprob
from quire.server.apis.openai.logprobs import chat_logprobs
from quire.server.apis.responses.conversation import SocketConversation
from quire.server.apis.responses.events import ResponseEvent
from quire.server.apis.responses.items import (
    InputTokensDetails,
    OutputTokenLogprob,
    OutputTokensDetails,
    OutputTopLogprob,
    ResponseUsage,
)
from quire.server.apis.responses.store import ResponseStore, StoredResponse
from quire.server.chat.dialogue import (
    ChatEvent,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolCallBegin,
    ToolCallDelta,
)
from quire.server.chat.generation import ChatGeneration
from quire.server.chat.thinking import reasoning_tokens
from quire.server.errors import ApiError, as_api_error
from quire.server.telemetry.metrics import ServerMetrics

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

STEERED = "steered"
"""The reason why a response is incomplete that steering input has ended."""


class ResponseAnswer:
    """Feeds a generation's events to a response's writer.

    Args:
        stored: holds the response.
        store: takes in the response when it is done; None keeps none.
        top_logprobs: None gives no log-probabilities.
        conversation: what a WebSocket keeps for its next turn.
    """

    def __init__(
        self,
        reply: ChatGeneration,
        stored: StoredResponse,
        store: ResponseStore | None,
        *,
        tokenizer: Tokenizer,
        top_logprobs: int | None,
        conversation: SocketConversation | None = None,
    ) -> None:
        self.reply = reply
        self.stored = stored
        self.store = store
        self.tokenizer = tokenizer
        self.top_logprobs = top_logprobs
        self.conversation = conversation
        self.token_ids: list[int] = []
        self.writer = stored.writer
        self.begun = False
        self.incomplete: str | None = None

    async def warm_up(self) -> list[ResponseEvent]:
        """Runs the prompt, and returns the events of a response without output."""
        await self.reply.whole()
        self.writer.begin()
        self.writer.progress()
        usage = usage_of(self.reply)
        usage.total_tokens, usage.output_tokens = usage.input_tokens, 0
        usage.output_tokens_details.reasoning_tokens = 0
        self.writer.finish(usage, empty=True)
        if self.conversation is not None:
            self.conversation.keep(self.stored)
        return self.writer.take()

    async def whole(self) -> None:
        """Runs the generation to its end."""
        self.reply.start()
        try:
            async for events in self.reply.batches():
                self._feed(events)
        finally:
            await self.reply.close()
        self._end()

    def start_in_background(self, metrics: ServerMetrics) -> None:
        """Stores the response, and lets it run whether a client waits or not."""
        self.writer.begin()
        if self.store is not None:
            self.store.add(self.stored)
        self._tell()
        self.stored.task = asyncio.create_task(self._in_background(metrics))

    async def _in_background(self, metrics: ServerMetrics) -> None:
        """Runs the generation to any end, passing events to those who watch."""
        stored, writer = self.stored, self.writer
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
            stored.task = None
            self._tell()
            await self.reply.close()

    def write(self, events: list[ChatEvent]) -> list[ResponseEvent]:
        if not self.begun:
            self.writer.begin()
        self._feed(events)
        return self.writer.take()

    def finish(self) -> list[ResponseEvent]:
        self._end()
        return self.writer.take()

    def fail(self, error: ApiError) -> list[ResponseEvent]:
        self.writer.fail(error)
        return self.writer.take()

    def _tell(self) -> None:
        if self.store is not None:
            self.store.grow(self.stored, self.writer.take())

    def _feed(self, events: Iterable[ChatEvent]) -> None:
        writer = self.writer
        if not self.begun:
            self.begun = True
            writer.progress()
        ended = False
        for event in events:
            if self.conversation is not None and not isinstance(event, Finished):
                self.token_ids += event.token_ids
            match event:
                case TextDelta(text="") if self.top_logprobs is None:
                    pass
                case TextDelta():
                    writer.text(event.text, self._logprobs(event.token_ids, event.logprobs))
                case ReasoningDelta():
                    writer.reasoning(event.text)
                case ToolCallBegin():
                    writer.call(event.id, event.name, custom=event.is_custom)
                case ToolCallDelta():
                    writer.arguments(event.arguments)
                case Finished():
                    ended = True
                    if event.finish_reason == "length":
                        self.incomplete = "max_output_tokens"
        if not ended and self.conversation is not None and self.conversation.steers:
            self._stop_between_calls()

    def _stop_between_calls(self) -> None:
        """Ends the generation for steering input, unless the model is writing a call."""
        if self.incomplete is None and not self.writer.in_call:
            self.incomplete = STEERED
            self.reply.stop()

    def _end(self) -> None:
        self._finish()
        if self.conversation is not None:
            self.conversation.memo.extend(self.tokenizer, self.token_ids)
            self.conversation.keep(self.stored)
        if self.store is not None:
            self.store.add(self.stored)

    def _finish(self) -> None:
        usage, incomplete = usage_of(self.reply), self.incomplete
        self.writer.finish(usage, incomplete=incomplete, empty=incomplete == STEERED)

    def _logprobs(
        self, token_ids: list[int], entries: list[dict[int, Logprob]]
    ) -> list[OutputTokenLogprob]:
        if self.top_logprobs is None:
            return []
        return [
            OutputTokenLogprob(
                entry.token,
                entry.logprob,
                entry.bytes or [],
                [OutputTopLogprob(t.token, t.logprob, t.bytes or []) for t in entry.top_logprobs],
            )
            for entry in chat_logprobs(self.tokenizer, token_ids, entries, self.top_logprobs)
        ]


def usage_of(reply: ChatGeneration) -> ResponseUsage:
    usage = reply.usage
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        OutputTokensDetails(reasoning_tokens(usage)),
        usage.total_tokens,
    )


class BackgroundEvents:
    """Events of a background response after one of them, as a source of `EventStream`."""

    def __init__(self, stored: StoredResponse, after: int) -> None:
        self.stored = stored
        self.after = after

    def start(self) -> None:
        """Does nothing: the response runs by itself."""

    async def ready(self) -> None:
        """Returns at once: the events are there or come."""

    async def close(self) -> None:
        """Does nothing: the response goes on without those who watch."""

    def batches(self) -> AsyncIterator[list[ResponseEvent]]:
        return self.stored.watch(self.after)
