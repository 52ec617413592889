"""Which route answers its errors in whose shape."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.server import errors
from quire.server.anthropic import errors as anthropic_errors
from quire.server.errors import ApiError, as_api_error


def is_anthropic(path: str) -> bool:
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def error_response(error: ApiError, path: str) -> Response:
    if is_anthropic(path):
        return anthropic_errors.error_response(error)
    return errors.error_response(error)


async def handle_error(request: Request, error: Exception) -> Response:
    """Exception handler of the app: counts the error and answers in the shape of the route's API,
    which holds for paths and methods that do not exist too."""
    api_error = as_api_error(error)
    request.app.state.metrics.count_error(api_error.status)
    return error_response(api_error, request.url.path)
