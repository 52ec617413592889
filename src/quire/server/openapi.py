"""`/openapi.json`: the routes' requests and answers, from the types that they are made of."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from quire import __version__
from quire.features.disaggregation.messages import Grant, Welcome
from quire.server.apis.admin import kv_events, management, peers
from quire.server.apis.admin.adapters import LoadAdapterRequest, UnloadAdapterRequest
from quire.server.apis.anthropic import events as anthropic
from quire.server.apis.anthropic.protocol import CountTokensRequest, MessagesRequest
from quire.server.apis.batch.batches import BatchList, CreateBatchRequest
from quire.server.apis.batch.files import MAX_LISTED, DeletedFile, FileList, UploadRequest
from quire.server.apis.batch.store import BatchObject, FileObject
from quire.server.apis.openai import objects as openai
from quire.server.apis.openai import stored_chats
from quire.server.apis.openai.protocol import ChatRequest, CompletionRequest, GenerateRequest
from quire.server.apis.openai.tokenize import (
    AppliedTemplate,
    ApplyTemplateRequest,
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
)
from quire.server.apis.responses import items as responses
from quire.server.apis.responses.protocol import CreateRequest, PromptFields
from quire.server.apis.scoring.embeddings import (
    EmbeddingList,
    EmbeddingRequest,
    PoolingList,
    PoolingRequest,
)
from quire.server.apis.scoring.scores import (
    RERANK_PATHS,
    SCORE_PATHS,
    RerankAnswer,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from quire.server.errors import ErrorBody
from quire.server.http.anthropic_errors import AnthropicErrorBody
from quire.server.http.auth import PUBLIC_PATHS
from quire.server.http.error_handler import is_anthropic
from quire.server.http.sse import json_response
from quire.server.state import state_of

_REFERENCE = "#/components/schemas/"
_ASKED = "Request."
"""Prefix of the names of request schemas, which may equal those of answers."""

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Route:
    """A route as the document describes it.

    Attributes:
        answer: a type, or a media type for answers that are no JSON.
        stream: media type of the answer with `stream`.
        query: schemas of the query parameters.
        media: media type of the body.
    """

    method: str
    path: str
    summary: str
    body: type[BaseModel] | None = None
    answer: Any = None
    stream: str | None = None
    query: Mapping[str, Schema] = field(default_factory=dict)
    media: str = "application/json"


_EVENTS = "text/event-stream"
_EVENT: Schema = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_FLAG: Schema = {"type": "string", "enum": ["true", "false"]}
_PAGING: Schema = {
    "after": {"type": "string"},
    "order": {"type": "string", "enum": ["asc", "desc"]},
    "limit": {"type": "integer", "minimum": 1, "maximum": 100},
}
_ONE = "/v1/responses/{response_id}"
_CHAT = "/v1/chat/completions/{completion_id}"
_FILE = "/v1/files/{file_id}"
_CHAT_ANSWER = openai.CompletionObject[openai.ChatChoice]

ROUTES = (
    Route("post", "/v1/completions", "Complete text", CompletionRequest,
          openai.CompletionObject[openai.CompletionChoice],
          _EVENTS),
    Route("post", "/v1/chat/completions", "Answer a conversation", ChatRequest,
          _CHAT_ANSWER, _EVENTS),
    Route("get", "/v1/chat/completions", "Stored chat completions", None, stored_chats.ChatList,
          query=_PAGING | {"model": {"type": "string"}}),
    Route("get", _CHAT, "A stored chat completion", None, _CHAT_ANSWER),
    Route("post", _CHAT, "Change its metadata", stored_chats.UpdateRequest, _CHAT_ANSWER),
    Route("delete", _CHAT, "Forget it", None, stored_chats.DeletedChat),
    Route("get", f"{_CHAT}/messages", "What it answered", None, stored_chats.MessageList,
          query=_PAGING),
    Route("post", "/v1/embeddings", "Turn texts into vectors", EmbeddingRequest, EmbeddingList),
    Route("post", "/pooling", "The same, with a choice of pooling", PoolingRequest, PoolingList),
    *(Route("post", path, "Score pairs of texts", ScoreRequest, ScoreList) for path in SCORE_PATHS),
    *(Route("post", path, "Order documents by relevance", RerankRequest, RerankAnswer)
      for path in RERANK_PATHS),
    Route("post", "/v1/responses", "Create a response", CreateRequest, responses.Response, _EVENTS),
    Route("post", "/v1/responses/input_tokens", "Count the tokens of a response's prompt",
          PromptFields, responses.InputTokens),
    Route("get", _ONE, "A stored response", None, responses.Response, _EVENTS,
          {"stream": _FLAG, "include_obfuscation": _FLAG,
           "starting_after": {"type": "integer", "minimum": -1}}),
    Route("delete", _ONE, "Forget a response", None, responses.DeletedResponse),
    Route("post", f"{_ONE}/cancel", "End a background response", None, responses.Response),
    Route("get", f"{_ONE}/input_items", "What a response answered", None, responses.ItemList, None,
          _PAGING),
    Route("post", "/v1/messages", "Answer a conversation, as Anthropic's API does",
          MessagesRequest, anthropic.Message, _EVENTS),
    Route("post", "/v1/messages/count_tokens", "Count the tokens of a conversation",
          CountTokensRequest, anthropic.TokenCount),
    Route("get", "/v1/models", "The served model and its adapters", None, openai.ModelList),
    Route("get", "/v1/models/{model}", "The served model, or an adapter", None, openai.ModelCard),
    Route("post", "/v1/load_lora_adapter", "Give a name to a LoRA adapter", LoadAdapterRequest,
          "text/plain"),
    Route("post", "/v1/unload_lora_adapter", "Forget a LoRA adapter", UnloadAdapterRequest,
          "text/plain"),
    Route("post", "/v1/files", "Upload the input of a batch", UploadRequest, FileObject,
          media="multipart/form-data"),
    Route("get", "/v1/files", "Files", None, FileList,
          query=_PAGING | {"purpose": {"type": "string"},
                           "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED}}),
    Route("get", _FILE, "A file's name and size", None, FileObject),
    Route("delete", _FILE, "Delete a file", None, DeletedFile),
    Route("get", f"{_FILE}/content", "A file's bytes", None, "application/octet-stream"),
    Route("post", "/v1/batches", "Answer a file of requests", CreateBatchRequest, BatchObject),
    Route("get", "/v1/batches", "Batches", None, BatchList,
          query={name: _PAGING[name] for name in ("after", "limit")}),
    Route("get", "/v1/batches/{batch_id}", "A batch as it stands", None, BatchObject),
    Route("post", "/v1/batches/{batch_id}/cancel", "End a batch", None, BatchObject),
    Route("post", "/tokenize", "Text or a conversation to tokens", TokenizeRequest, Tokenized),
    Route("post", "/detokenize", "Tokens to text", DetokenizeRequest, Detokenized),
    Route("get", "/tokenizer_info", "The tokenizer's settings", None, dict[str, Any]),
    Route("post", "/apply-template", "A conversation to its prompt", ApplyTemplateRequest,
          AppliedTemplate),
    Route("post", "/generate", "Complete one prompt", GenerateRequest, openai.GenerateAnswer,
          "text/plain"),
    Route("get", "/engine/live", "What the engine is at, while somebody looks", None, _EVENTS,
          query={"rate": {"type": "integer", "minimum": 1, "maximum": 10},
                 "frames": {"type": "integer", "minimum": 0}}),
    Route("get", "/", "The playground: a page for people", None, "text/html"),
    Route("get", "/health", "Whether the engine lives", None, dict[str, str]),
    Route("get", "/ready", "Whether requests are taken now", None, dict[str, str]),
    Route("get", "/ping", "Whether the engine lives, for load balancers", None, "text/plain"),
    Route("post", "/ping", "The same", None, "text/plain"),
    Route("get", "/version", "The server's version", None, management.ServerVersion),
    Route("get", "/load", "Requests that run and wait", None, management.Load),
    Route("get", "/server_info", "The engine's settings, for admins", None,
          management.ServerInfo),
    Route("post", "/reset_prefix_cache", "Forget cached prefixes, for admins", None,
          management.CacheResetAnswer),
    Route("post", "/kv/handshake", "Compare engines, before one reads blocks of the other",
          peers.HandshakeBody, Welcome),
    Route("post", "/kv/prefill", "Compute a prompt for another engine", peers.PrefillBody, Grant),
    Route("get", "/kv/events", "What the caches hold, and their changes, for admins", None,
          kv_events.NDJSON),
    Route("put", "/kv/peers", "Say who computes prompts for this server, for admins",
          kv_events.PeersBody, kv_events.PeersAnswer),
    Route("post", "/sleep", "Free the engine's devices, for admins", None, management.SleepState,
          query={"level": {"type": "integer", "minimum": 1, "maximum": 2}}),
    Route("post", "/wake_up", "Start the engine again, for admins", None, management.SleepState),
    Route("get", "/is_sleeping", "Whether the engine sleeps", None, management.SleepState),
    Route("get", "/metrics", "Prometheus metrics", None, "text/plain"),
    Route("get", "/openapi.json", "This document", None, dict[str, Any]),
)  # fmt: skip


async def openapi(request: Request) -> Response:
    state = state_of(request)
    args, keys = state.args, state.keys.required
    open_paths = PUBLIC_PATHS | ({"/metrics"} if args.public_metrics else set())
    return json_response(await asyncio.to_thread(document, keys, open_paths, args.root_path))


@functools.cache
def document(keys: bool, open_paths: frozenset[str] = PUBLIC_PATHS, root_path: str = "") -> Schema:
    """Returns the OpenAPI 3.1 document.

    Args:
        keys: requests need an API key, but for those to `open_paths`.
    """
    asked, requests = _request_schemas()
    given, answers = _answer_schemas()
    paths: Schema = {}
    for route in ROUTES:
        operation = _operation(route, asked, given)
        if keys and route.path not in open_paths:
            operation["security"] = _security(route.path)
        paths.setdefault(route.path, {})[route.method] = operation
    components: Schema = {"schemas": requests | answers}
    if keys:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": components,
    }


def _security(path: str) -> list[Schema]:
    either: list[Schema] = [{"bearer": []}]
    return [*either, {"x-api-key": []}] if is_anthropic(path) else either


def _request_schemas() -> tuple[dict[type[BaseModel], Schema], Schema]:
    """Returns references by model, and the schemas that they refer to."""
    models: list[type[BaseModel]] = [route.body for route in ROUTES if route.body is not None]
    found, shared = models_json_schema(
        [(model, "validation") for model in models], ref_template=f"{_REFERENCE}{_ASKED}{{model}}"
    )
    schemas = {f"{_ASKED}{name}": schema for name, schema in shared["$defs"].items()}
    return {model: found[model, "validation"] for model in models}, schemas


def _answer_schemas() -> tuple[dict[Any, Schema], Schema]:
    types = [route.answer for route in ROUTES if not isinstance(route.answer, str)]
    types += [ErrorBody, AnthropicErrorBody]
    found, schemas = msgspec.json.schema_components(types, ref_template=f"{_REFERENCE}{{name}}")
    return dict(zip(types, found, strict=True)), schemas


def _operation(
    route: Route, asked: dict[type[BaseModel], Schema], given: dict[Any, Schema]
) -> Schema:
    media = route.answer if isinstance(route.answer, str) else "application/json"
    text = {"schema": {"type": "string"}}
    content: Schema = {media: text if route.answer == media else {"schema": given[route.answer]}}
    if route.stream is not None:
        content[route.stream] = {"schema": _EVENT} if route.stream == _EVENTS else text
    shape = AnthropicErrorBody if is_anthropic(route.path) else ErrorBody
    failure = {"application/json": {"schema": given[shape]}}
    operation: Schema = {
        "summary": route.summary,
        "operationId": f"{route.method}{route.path}".translate(_PLAIN),
        "responses": {
            "200": {"description": "The answer", "content": content},
            "4XX": {"description": "The request is at fault", "content": failure},
            "5XX": {"description": "The server is at fault", "content": failure},
        },
    }
    if route.body is not None:
        body = {route.media: {"schema": asked[route.body]}}
        operation["requestBody"] = {"required": True, "content": body}
    parameters = [
        {"name": name.strip("{}"), "in": "path", "required": True, "schema": {"type": "string"}}
        for name in route.path.split("/")
        if name.startswith("{")
    ]
    parameters += [
        {"name": name, "in": "query", "schema": schema} for name, schema in route.query.items()
    ]
    if parameters:
        operation["parameters"] = parameters
    return operation


_PLAIN = str.maketrans({"/": "_", "{": None, "}": None, ".": "_"})
