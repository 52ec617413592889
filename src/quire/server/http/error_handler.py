"""Turns exceptions into error responses in the shape of each route's API."""

from __future__ import annotations

from starlette._utils import get_route_path
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from quire.server import errors
from quire.server.context.request_context import context_in
from quire.server.errors import ApiError, as_api_error
from quire.server.http import anthropic_errors, ollama_errors
from quire.server.http.unknown_routes import no_such_method, no_such_route


def route_of(scope: Scope) -> str:
    """Returns the path without the root path, as Starlette's router sees it.

    It uses Starlette's own function, so that middleware and router agree on every path.
    """
    return get_route_path(scope)


def is_anthropic(path: str) -> bool:
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def is_ollama(path: str) -> bool:
    return path.startswith("/api/")


def error_response(error: ApiError, scope: Scope) -> Response:
    path = route_of(scope)
    if is_anthropic(path):
        return anthropic_errors.error_response(error, context_in(scope).id)
    if is_ollama(path) and scope["app"].state.server.args.ollama_api is not None:
        return ollama_errors.error_response(error)
    return errors.error_response(error)


async def handle_error(request: Request, error: Exception) -> Response:
    """Counts an error, and answers it in the shape of the route's API.

    It also handles unknown paths and methods.
    """
    api_error = _route_error(request, error) or as_api_error(error)
    request.app.state.metrics.count_error(api_error)
    response = error_response(api_error, request.scope)
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)
    return response


def _route_error(request: Request, error: Exception) -> ApiError | None:
    """Returns the error for an unknown path or method; None for any other error."""
    if not isinstance(error, HTTPException):
        return None
    path = route_of(request.scope)
    if error.status_code == 404:
        return no_such_route(request.scope, path, request.app.routes)
    allowed = (error.headers or {}).get("Allow")
    return no_such_method(request.scope, path, allowed) if allowed else None
