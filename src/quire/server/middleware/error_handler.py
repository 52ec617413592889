"""Error responses, in the shape of each route's API."""

from __future__ import annotations

from starlette._utils import get_route_path
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from quire.server import errors
from quire.server.anthropic import errors as anthropic_errors
from quire.server.errors import ApiError, as_api_error
from quire.server.middleware.request_context import context_in


def route_of(scope: Scope) -> str:
    """Returns the path as the router sees it, without the root path.

    Starlette's own function is used, so that middleware and router agree on every path.
    """
    return get_route_path(scope)


def is_anthropic(path: str) -> bool:
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def error_response(error: ApiError, scope: Scope) -> Response:
    if is_anthropic(route_of(scope)):
        return anthropic_errors.error_response(error, context_in(scope).id)
    return errors.error_response(error)


async def handle_error(request: Request, error: Exception) -> Response:
    """Counts an error and answers it in the shape of the route's API.

    Errors of unknown paths and methods are handled too.
    """
    api_error = as_api_error(error)
    request.app.state.metrics.count_error(api_error)
    return error_response(api_error, request.scope)
