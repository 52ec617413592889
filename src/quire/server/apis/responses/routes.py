"""`/v1/responses` and what is below it."""

from __future__ import annotations

import asyncio
import time

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from quire.features.conversation_leases.calls import CONVERSATION
from quire.server.apis.responses import items as response_items
from quire.server.apis.responses.answer import BackgroundEvents, ResponseAnswer, usage_of
from quire.server.apis.responses.conversation import (
    CONVERSATION_KEY,
    SocketConversation,
    SocketStore,
)
from quire.server.apis.responses.convert import (
    NAMES,
    compacted,
    compacting,
    dialogue_of,
    items_of,
    response_of,
    stores,
    tools_of,
    turns_in,
    without_oldest,
)
from quire.server.apis.responses.events import ResponseEvent, ResponseWriter
from quire.server.apis.responses.items import (
    CompactedResponse,
    DeletedResponse,
    InputTokens,
    Item,
    ItemList,
    shown,
)
from quire.server.apis.responses.protocol import (
    ENCRYPTED,
    LOGPROBS,
    CompactRequest,
    CreateRequest,
    PromptFields,
)
from quire.server.apis.responses.store import ResponseSource, ResponseStore, StoredResponse
from quire.server.apis.responses.tools import ToolSearch, flat_name
from quire.server.apis.route import EVENTS, FLAG, PAGE_QUERY, Route
from quire.server.chat.dialogue import Dialogue
from quire.server.chat.generation import count, prepare
from quire.server.context.request_context import RequestContext, context_of, owner_of
from quire.server.errors import ApiError, rename_fields
from quire.server.http.bodies import read_body
from quire.server.http.query import PAGING, Query, page_of
from quire.server.http.sse import (
    EventStream,
    json_response,
    pad_event,
    start_stream,
    unless_disconnected,
)
from quire.server.state import ServerState, state_of


async def create_response(request: Request) -> Response:
    state = state_of(request)
    body = await read_body(request, CreateRequest, state.args.max_body_bytes)
    state.check_alive()
    state.check_model(body.model, context_of(request))
    if body.background and not stores(state, body):
        raise ApiError(
            400,
            "'background' is not available: this server keeps no responses "
            "(--response-store-size is 0).",
            param="background",
        )
    conversation: SocketConversation | None = request.scope.get(CONVERSATION_KEY)
    source: ResponseSource = store_of(request)
    if conversation is not None:
        source = SocketStore(conversation, store_of(request))
    items = items_of(body, source, owner_of(request))
    with rename_fields(NAMES):
        return await _answer(request, body, items, conversation)


async def _answer(
    request: Request,
    body: CreateRequest,
    items: tuple[Item, ...],
    conversation: SocketConversation | None,
) -> Response:
    state = state_of(request)
    state.check_generates()
    dialogue = await _fitted(state, body, items, context_of(request))
    if conversation is not None:
        context_of(request).fields[CONVERSATION] = conversation.id
        dialogue.memo, dialogue.with_tokens = conversation.memo, True
        if not conversation.generate:
            dialogue.params, dialogue.default_max_tokens = (
                replace(dialogue.params, max_tokens=1), None
            )  # fmt: skip
    reply = await prepare(state, dialogue, context_of(request))
    given, found = tools_of(body, items)
    writer = ResponseWriter(
        response_of(state, body, dialogue, context_of(request).model),
        {
            flat_name(namespace, tool.name): (namespace, tool.name)
            for namespace, tool in (*given, *found)
            if namespace is not None
        },
        searches=any(isinstance(tool, ToolSearch) for _, tool in given),
        seals=ENCRYPTED in (body.include or ()),
    )
    stored = StoredResponse(writer, items, owner_of(request))
    if conversation is not None:
        conversation.active = stored
    answer = ResponseAnswer(
        reply,
        stored,
        store_of(request) if stores(state, body) else None,
        tokenizer=state.tokenizer("input"),
        top_logprobs=(body.top_logprobs or 0) if LOGPROBS in (body.include or ()) else None,
        conversation=conversation,
    )
    if conversation is not None and not conversation.generate:
        events = await unless_disconnected(request.receive, answer.warm_up())
        return Response(b"".join(event.data + b"\n" for event in events))
    obfuscate = body.stream_options is not None and body.stream_options.include_obfuscation
    if body.background:
        await reply.check_grammar()
        answer.start_in_background(state.metrics)
        if body.stream:
            return _stream(state, stored, -1, obfuscate)
        return json_response(stored.response)
    if not body.stream:
        stored.writer.streams = False
        await unless_disconnected(request.receive, answer.whole())
        return json_response(stored.response)
    await start_stream(request, reply)
    write = _write if conversation is None else _write_lines
    return EventStream(
        reply,
        lambda buffer, events: write(buffer, answer.write(events), obfuscate),
        lambda buffer: write(buffer, answer.finish(), obfuscate),
        fail=lambda buffer, error: write(buffer, answer.fail(error), obfuscate),
        metrics=state.metrics,
    )


async def count_input_tokens(request: Request) -> Response:
    state = state_of(request)
    body = await read_body(request, PromptFields, state.args.max_body_bytes)
    state.check_alive()
    state.check_model(body.model, context_of(request))
    items = items_of(body, store_of(request), owner_of(request))
    with rename_fields(NAMES):
        context = context_of(request)
        ids = await count(state, await _fitted(state, body, items, context), context)
    return json_response(InputTokens(len(ids)))


async def compact_response(request: Request) -> Response:
    """Answers with the conversation's user messages, and a summary that the model writes.

    The tools stay in the prompt, whose beginning is then in the cache. A model that calls one
    instead of writing a summary is asked again, without tools.
    """
    state = state_of(request)
    body = await read_body(request, CompactRequest, state.args.max_body_bytes)
    state.check_alive()
    state.check_model(body.model, context_of(request))
    state.check_generates()
    items = items_of(body, store_of(request), owner_of(request))
    for choice in ("auto", "none"):
        body = body.model_copy(update={"tool_choice": choice, "text": None})
        with rename_fields(NAMES):
            dialogue = await _fitted(state, body, compacting(items), context_of(request))
            reply = await prepare(state, dialogue, context_of(request))
            (answer,) = await unless_disconnected(request.receive, reply.whole())
        if summary := answer.text.strip():
            output, usage = compacted(items, summary), usage_of(reply)
            return json_response(
                CompactedResponse(dialogue.request_id, int(time.time()), output, usage)
            )
    raise ApiError(500, "The model wrote no summary.", code="no_summary")


async def get_response(request: Request) -> Response:
    """Answers with a stored response; with `stream`, with the events of one made in the
    background."""
    query = Query(request, "stream", "starting_after", "include_obfuscation")
    stored = _stored(request)
    if not query.flag("stream"):
        for name in ("starting_after", "include_obfuscation"):
            if query.text(name) is not None:
                raise ApiError(400, f"'{name}' is only allowed with stream=true.", param=name)
        stored.writer.flush()
        return json_response(stored.response)
    if not stored.response.background:
        raise ApiError(
            400,
            "'stream': only responses created with background=true can be streamed again.",
            param="stream",
        )
    after = query.integer("starting_after", -1, -1)
    return _stream(state_of(request), stored, after, query.flag("include_obfuscation"))


async def cancel_response(request: Request) -> Response:
    stored = _stored(request)
    if not stored.response.background:
        raise ApiError(
            400,
            f"The response '{stored.response.id}' was not created with background=true: cancel it "
            "by closing its connection.",
            param="response_id",
        )
    if stored.task is not None:
        stored.task.cancel()
        await asyncio.gather(stored.task, return_exceptions=True)
    return json_response(stored.response)


async def delete_response(request: Request) -> Response:
    stored = _stored(request)
    store_of(request).remove(stored)
    return json_response(DeletedResponse(stored.response.id))


async def list_input_items(request: Request) -> Response:
    """Lists all items that the response answered, earlier turns included."""
    query = Query(request, *PAGING)
    items = list(_stored(request).input)
    # Every stored item was given an id.
    page = page_of(query, items, [item.id or "" for item in items], order=("desc", "asc"))
    data = [shown(item) for item in page.data]
    return json_response(ItemList(data, page.first_id, page.last_id, page.has_more))


def store_of(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.response_store
    return store


def _stored(request: Request) -> StoredResponse:
    return store_of(request).get(
        request.path_params["response_id"], "response_id", owner_of(request)
    )


async def _fitted(
    state: ServerState, body: PromptFields, items: tuple[Item, ...], context: RequestContext
) -> Dialogue:
    """Returns the dialogue, with truncation "auto" without its oldest turns where it is too long.

    As few turns as possible are left out to leave room for the answer, which gets at most half of
    the context. The last turn stays.
    """
    dialogue = await asyncio.to_thread(dialogue_of, state, body, items)
    if body.truncation != "auto":
        return dialogue
    most = state.client.config.scheduler.max_model_len
    room = most - min(getattr(body, "max_output_tokens", None) or 1, most // 2)
    low, high = 0, max(turns_in(items) - 1, 0)
    while low < high:
        middle = (low + high) // 2
        dialogue = await asyncio.to_thread(dialogue_of, state, body, without_oldest(items, middle))
        if len(await count(state, dialogue, context)) <= room:
            high = middle
        else:
            low = middle + 1
    return await asyncio.to_thread(dialogue_of, state, body, without_oldest(items, low))


def _stream(state: ServerState, stored: StoredResponse, after: int, obfuscate: bool) -> Response:
    return EventStream(
        BackgroundEvents(stored, after),
        lambda buffer, events: _write(buffer, events, obfuscate),
        lambda buffer: None,
        metrics=state.metrics,
    )


def _write(buffer: bytearray, events: list[ResponseEvent], obfuscate: bool) -> None:
    for event in events:
        event.write(buffer, obfuscate)


def _write_lines(buffer: bytearray, events: list[ResponseEvent], obfuscate: bool) -> None:
    """Writes one event per line, for a WebSocket."""
    for event in events:
        delta = obfuscate and event.type.endswith(".delta")
        buffer += (pad_event(event.data) if delta else event.data) + b"\n"


_ONE = "/v1/responses/{response_id}"
_STREAM_QUERY = {
    "stream": FLAG,
    "include_obfuscation": FLAG,
    "starting_after": {"type": "integer", "minimum": -1},
}

ROUTES = (
    Route("post", "/v1/responses", create_response, "Create a response",
          CreateRequest, response_items.Response, EVENTS, counted=True),
    Route("post", "/v1/responses/input_tokens", count_input_tokens,
          "Count the tokens of a response's prompt",
          PromptFields, InputTokens, counted=True, queued=False),
    Route("post", "/v1/responses/compact", compact_response,
          "Summarize a conversation, so that its next turn is short",
          CompactRequest, CompactedResponse, counted=True),
    Route("get", _ONE, get_response, "A stored response",
          answer=response_items.Response, stream=EVENTS, query=_STREAM_QUERY),
    Route("delete", _ONE, delete_response, "Forget a response", answer=DeletedResponse),
    Route("post", f"{_ONE}/cancel", cancel_response, "End a background response",
          answer=response_items.Response),
    Route("get", f"{_ONE}/input_items", list_input_items, "What a response answered",
          answer=ItemList, query=PAGE_QUERY),
)  # fmt: skip
