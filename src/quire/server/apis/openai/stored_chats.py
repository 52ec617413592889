"""`/v1/chat/completions` and below: completions that were stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.server.apis.openai.objects import ChatChoice, CompletionObject
from quire.server.context.request_context import owner_of
from quire.server.errors import ApiError
from quire.server.http.bodies import read_body
from quire.server.http.query import PAGING, Page, Query, page_of
from quire.server.http.sse import json_response
from quire.server.http.strict_model import Metadata, StrictModel
from quire.server.state import state_of
from quire.server.store import BoundedStore


@dataclass(slots=True)
class StoredChat:
    """A chat completion and the conversation that it answers.

    Attributes:
        completion: the answer as it was sent.
        messages: the conversation, as chat templates take it.
        owner: digest of the API key whose requests may see it.
    """

    completion: CompletionObject[ChatChoice]
    messages: list[dict[str, Any]]
    owner: bytes

    def measure(self) -> int:
        """Estimates the bytes that it takes."""
        return len(msgspec.json.encode(self.completion)) + len(msgspec.json.encode(self.messages))


class ChatStore(BoundedStore[StoredChat]):
    """Keeps chat completions, each for its owner."""

    def add(self, chat: StoredChat) -> None:
        self.put(chat.completion.id, chat, chat.measure())

    def update(self, chat: StoredChat) -> None:
        """Notes that a kept completion has changed."""
        self.resize(chat.completion.id, chat.measure())

    def get(self, id: str, owner: bytes) -> StoredChat:
        """Returns a stored completion. Raises ApiError, 404, naming the id."""
        chat = self.find(id)
        if chat is None or chat.owner != owner:
            raise ApiError(
                404,
                f"Chat completion with id '{id[:200]}' not found: it was never stored, or is no "
                "longer (see 'completion_id').",
                param="completion_id",
                code="completion_not_found",
            )
        return chat

    def all(self, owner: bytes) -> list[StoredChat]:
        """Returns the owner's completions, oldest first."""
        return [chat for chat in self.values() if chat.owner == owner]

    def remove(self, chat: StoredChat) -> None:
        self.discard(chat.completion.id)


_OTHER_ROUTES = {
    "batch": "send a request for each conversation, or a file of them to /v1/batches",
    "render": "send the conversation to /tokenize or /apply-template",
}
"""Maps vLLM's routes below `/v1/chat/completions`, which are no ids, to what to use instead."""


class UpdateRequest(StrictModel):
    metadata: Metadata | None


class ChatList(Page[CompletionObject[ChatChoice]]):
    pass


class StoredMessage(msgspec.Struct):
    id: str
    role: str
    content: str | None
    content_parts: None = None
    name: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET
    tool_call_id: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class MessageList(Page[StoredMessage]):
    pass


class DeletedChat(msgspec.Struct):
    id: str
    object: str = "chat.completion.deleted"
    deleted: bool = True


def chat_store(request: Request) -> ChatStore:
    store: ChatStore = request.app.state.chat_store
    return store


def check_store(request: Request) -> None:
    if chat_store(request).max_items == 0:
        raise ApiError(
            400,
            "'store' is not available: this server keeps no completions "
            "(--response-store-size is 0).",
            param="store",
        )


async def list_chats(request: Request) -> Response:
    wanted = {
        name[len("metadata[") : -1]: name
        for name in request.query_params
        if name.startswith("metadata[") and name.endswith("]")
    }
    query = Query(request, *PAGING, "model", *wanted.values())
    model = query.text("model")
    found = [
        chat.completion
        for chat in chat_store(request).all(owner_of(request))
        if model in (None, chat.completion.model)
        and all(
            (chat.completion.metadata or {}).get(key) == query.text(name)
            for key, name in wanted.items()
        )
    ]
    page = page_of(query, found, [completion.id for completion in found])
    return json_response(page)


async def show_chat(request: Request) -> Response:
    return json_response(_stored(request).completion)


async def update_chat(request: Request) -> Response:
    instead = _OTHER_ROUTES.get(request.path_params["completion_id"])
    if instead is not None:
        path = request.url.path
        raise ApiError(404, f"This server has no {path}: {instead}.", code="not_found")
    body = await read_body(request, UpdateRequest, state_of(request).args.max_body_bytes)
    chat = _stored(request)
    chat.completion.metadata = body.metadata or {}
    chat_store(request).update(chat)
    return json_response(chat.completion)


async def delete_chat(request: Request) -> Response:
    chat = _stored(request)
    chat_store(request).remove(chat)
    return json_response(DeletedChat(chat.completion.id))


async def list_messages(request: Request) -> Response:
    query = Query(request, *PAGING)
    chat = _stored(request)
    messages = [
        StoredMessage(
            f"{chat.completion.id}-{place}",
            message["role"],
            message.get("content"),
            name=message.get("name", UNSET),
            tool_calls=message.get("tool_calls", UNSET),
            tool_call_id=message.get("tool_call_id", UNSET),
            reasoning_content=message.get("reasoning_content", UNSET),
        )
        for place, message in enumerate(chat.messages)
    ]
    page = page_of(query, messages, [message.id for message in messages])
    return json_response(page)


def _stored(request: Request) -> StoredChat:
    return chat_store(request).get(request.path_params["completion_id"], owner_of(request))
