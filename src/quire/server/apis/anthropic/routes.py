"""`/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response

from quire.server.apis.anthropic.convert import NAMES, dialogue_of
from quire.server.apis.anthropic.events import (
    Message,
    MessageUsage,
    MessageWriter,
    ModelInfo,
    ModelPage,
    ThinkingTokensDetails,
    TokenCount,
    write_event,
)
from quire.server.apis.anthropic.protocol import CountTokensRequest, MessagesRequest
from quire.server.apis.route import EVENTS, Route
from quire.server.chat.dialogue import (
    ChatEvent,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolCallBegin,
    ToolCallDelta,
)
from quire.server.chat.generation import ChatGeneration, count, prepare
from quire.server.chat.thinking import BudgetedChatGeneration, reasoning_tokens
from quire.server.context.request_context import context_of
from quire.server.errors import ApiError, rename_fields
from quire.server.http.anthropic_errors import error_body
from quire.server.http.bodies import Model, read_body
from quire.server.http.query import Query
from quire.server.http.sse import EventStream, json_response, start_stream, unless_disconnected
from quire.server.state import ServerState, state_of

VERSIONS = ("2023-06-01", "2026-10-21")
"""The newer version has no temperature, top_k and top_p. Both take them here, as models have them.
"""


async def create_message(request: Request) -> Response:
    state = state_of(request)
    body = await _read(request, state, MessagesRequest)
    with rename_fields(NAMES):
        return await _answer(request, body)


async def _answer(request: Request, body: MessagesRequest) -> Response:
    state = state_of(request)
    state.check_generates()
    dialogue = await asyncio.to_thread(dialogue_of, state, body)
    prepared = await prepare(state, dialogue, context_of(request))
    reply: ChatGeneration | BudgetedChatGeneration = prepared
    if body.budget is not None:
        reply = BudgetedChatGeneration(state, prepared, body.budget)
    context = context_of(request)
    answer = MessageAnswer(context.model or state.model_name, body, reply, context.id)
    if not body.stream:
        return json_response(await unless_disconnected(request.receive, answer.whole()))
    await start_stream(request, reply)
    return EventStream(
        reply,
        answer.write,
        answer.finish,
        fail=answer.fail,
        metrics=state.metrics,
    )


async def count_tokens(request: Request) -> Response:
    state = state_of(request)
    body = await _read(request, state, CountTokensRequest)
    with rename_fields(NAMES):
        dialogue = await asyncio.to_thread(dialogue_of, state, body)
        ids = await count(state, dialogue, context_of(request))
    return json_response(TokenCount(len(ids)))


def list_models(request: Request, names: list[str], created: int) -> Response:
    """Answers with the models in Anthropic's shape. created: seconds since 1970."""
    query = Query(request, "after_id", "before_id", "limit")
    limit = query.integer("limit", 20, 1, 1000)
    for field in ("after_id", "before_id"):
        given = query.text(field)
        if given is not None and given not in names:
            raise ApiError(400, f"'{field}': there is no '{given[:200]}'.", param=field)
    after, before = query.text("after_id"), query.text("before_id")
    left = names[0 if after is None else names.index(after) + 1 :]
    left = left if before is None else left[: left.index(before) if before in left else 0]
    page = left[-limit:] if before is not None else left[:limit]
    moment = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    data = [ModelInfo(name, name, moment) for name in page]
    first, last = (page[0], page[-1]) if page else (None, None)
    return json_response(ModelPage(data, first, last, len(left) > len(page)))


async def _read(request: Request, state: ServerState, model: type[Model]) -> Model:
    """Reads the body of a request of a known API version. Raises ApiError."""
    version = request.headers.get("anthropic-version")
    if version is not None and version not in VERSIONS:
        known = " and ".join(VERSIONS)
        raise ApiError(
            400, f"anthropic-version: {version[:40]!r} is not supported; known are {known}."
        )
    body = await read_body(request, model, state.args.max_body_bytes)
    state.check_alive()
    state.check_model(body.model, context_of(request))  # type: ignore[attr-defined]
    return body


class MessageAnswer:
    """Writes a reply as one message, or as the events of one."""

    def __init__(
        self,
        model: str,
        body: MessagesRequest,
        reply: ChatGeneration | BudgetedChatGeneration,
        request_id: str,
    ) -> None:
        self.reply = reply
        self.request_id = request_id
        self.max_tokens = body.max_tokens
        omitted = body.thinking is not None and body.thinking.display == "omitted"
        self.writer = MessageWriter(
            Message(id=reply.request_id, model=model, usage=self._usage()),
            streams=bool(body.stream),
            show_thinking=not omitted,
        )
        self.begun = False
        self.end = Finished(0, "stop")

    async def whole(self) -> Message:
        self.reply.start()
        try:
            async for events in self.reply.batches():
                self._feed(events)
        finally:
            await self.reply.close()
        self._end()
        return self.writer.message

    def write(self, buffer: bytearray, events: list[ChatEvent]) -> None:
        if not self.begun:
            self.begun = True
            self.writer.message.usage = self._usage()
            self.writer.begin()
        self._feed(events)
        buffer += self.writer.take()

    def finish(self, buffer: bytearray) -> None:
        self._end()
        buffer += self.writer.take()

    def fail(self, buffer: bytearray, error: ApiError) -> None:
        write_event(buffer, "error", error_body(error, self.request_id))

    def _feed(self, events: list[ChatEvent]) -> None:
        writer = self.writer
        for event in events:
            match event:
                case TextDelta():
                    writer.text(event.text)
                case ReasoningDelta():
                    writer.thinking(event.text)
                case ToolCallBegin():
                    writer.tool_use(event.id, event.name)
                case ToolCallDelta():
                    writer.input_json(event.arguments)
                case Finished():
                    self.end = event

    def _end(self) -> None:
        usage, end = self._usage(), self.end
        sequence = end.stop_reason if isinstance(end.stop_reason, str) else None
        if end.finish_reason == "tool_calls":
            reason, sequence = "tool_use", None
        elif end.finish_reason == "length":
            full = usage.output_tokens < self.max_tokens
            reason = "model_context_window_exceeded" if full else "max_tokens"
        else:
            reason = "end_turn" if sequence is None else "stop_sequence"
        self.writer.finish(usage, reason, sequence)

    def _usage(self) -> MessageUsage:
        usage = self.reply.usage
        cached = usage.prompt_tokens_details.cached_tokens
        return MessageUsage(
            usage.prompt_tokens - cached,
            cached,
            usage.completion_tokens,
            ThinkingTokensDetails(reasoning_tokens(usage)),
        )


ROUTES = (
    Route("post", "/v1/messages", create_message, "Answer a conversation, as Anthropic's API does",
          MessagesRequest, Message, EVENTS, counted=True),
    Route("post", "/v1/messages/count_tokens", count_tokens, "Count the tokens of a conversation",
          CountTokensRequest, TokenCount, counted=True, queued=False),
)  # fmt: skip
