"""`/openapi.json`: the routes' requests and answers, from the types that they are made of."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from quire import __version__
from quire.server import routes
from quire.server.apis.route import EVENTS, Route, Schema
from quire.server.errors import ErrorBody
from quire.server.http.anthropic_errors import AnthropicErrorBody
from quire.server.http.error_handler import is_anthropic, is_ollama
from quire.server.http.ollama_errors import OllamaErrorBody
from quire.server.http.sse import json_response
from quire.server.routes import PUBLIC_PATHS, SETTINGS, active_settings, public_paths
from quire.server.state import state_of

_REFERENCE = "#/components/schemas/"
_ASKED = "Request."
"""Prefix of the names of request schemas, which may equal those of answers."""


_EVENT: Schema = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}


async def openapi(request: Request) -> Response:
    state = state_of(request)
    args, keys = state.args, state.keys.required
    made = await asyncio.to_thread(
        document, keys, public_paths(args), args.root_path, active_settings(args)
    )
    return json_response(made)


ROUTES = (
    *routes.ROUTES,
    Route("get", "/openapi.json", openapi, "This document", answer=dict[str, Any]),
)
"""All routes of the server."""
_DESCRIBED = tuple(route for route in ROUTES if route.summary)


@functools.cache
def document(
    keys: bool,
    open_paths: frozenset[str] = PUBLIC_PATHS,
    root_path: str = "",
    settings: frozenset[str] = SETTINGS,
) -> Schema:
    """Returns the OpenAPI 3.1 document.

    Args:
        keys: requests need an API key, but for those to `open_paths`.
        settings: settings whose routes the server has.
    """
    asked, requests = _request_schemas()
    given, answers = _answer_schemas()
    paths: Schema = {}
    for route in _DESCRIBED:
        if route.setting and route.setting not in settings:
            continue
        operation = _operation(route, asked, given)
        if keys and route.path not in open_paths:
            operation["security"] = _security(route.path)
        paths.setdefault(route.described_path, {})[route.method] = operation
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
    models: list[type[BaseModel]] = [route.body for route in _DESCRIBED if route.body is not None]
    found, shared = models_json_schema(
        [(model, "validation") for model in models], ref_template=f"{_REFERENCE}{_ASKED}{{model}}"
    )
    schemas = {f"{_ASKED}{name}": schema for name, schema in shared["$defs"].items()}
    return {model: found[model, "validation"] for model in models}, schemas


def _answer_schemas() -> tuple[dict[Any, Schema], Schema]:
    types = [route.answer for route in _DESCRIBED if not isinstance(route.answer, str)]
    types += [ErrorBody, AnthropicErrorBody, OllamaErrorBody]
    found, schemas = msgspec.json.schema_components(types, ref_template=f"{_REFERENCE}{{name}}")
    return dict(zip(types, found, strict=True)), schemas


def _operation(
    route: Route, asked: dict[type[BaseModel], Schema], given: dict[Any, Schema]
) -> Schema:
    media = route.answer if isinstance(route.answer, str) else "application/json"
    text = {"schema": {"type": "string"}}
    content: Schema = {media: text if route.answer == media else {"schema": given[route.answer]}}
    if route.stream is not None:
        content[route.stream] = {"schema": _EVENT} if route.stream == EVENTS else text
    shape: Any = ErrorBody
    if is_anthropic(route.path):
        shape = AnthropicErrorBody
    elif is_ollama(route.path):
        shape = OllamaErrorBody
    failure = {"application/json": {"schema": given[shape]}}
    operation: Schema = {
        "summary": route.summary,
        "operationId": f"{route.method}{route.described_path}".translate(_PLAIN),
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
        for name in route.described_path.split("/")
        if name.startswith("{")
    ]
    parameters += [
        {"name": name, "in": "query", "schema": schema} for name, schema in route.query.items()
    ]
    if parameters:
        operation["parameters"] = parameters
    return operation


_PLAIN = str.maketrans({"/": "_", "{": None, "}": None, ".": "_"})
