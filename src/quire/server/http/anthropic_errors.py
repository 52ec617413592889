"""Error responses in Anthropic's shape: `{"type": "error", "error": {type, message}}`."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from quire.server.errors import ApiError

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicError(msgspec.Struct):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct):
    error: AnthropicError
    request_id: str
    type: str = "error"


def error_body(error: ApiError, request_id: str) -> AnthropicErrorBody:
    """Returns the error in Anthropic's shape.

    That shape has no field for the parameter's name, so the name goes into the message.
    """
    message = str(error)
    if error.code == "invalid_api_key":
        message = f"invalid x-api-key: {message}"  # Claude Code looks for these words
    if error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    kind = _KINDS.get(error.status) or (
        "api_error" if error.status >= 500 else "invalid_request_error"
    )
    return AnthropicErrorBody(AnthropicError(kind, message), request_id)


def error_response(error: ApiError, request_id: str) -> Response:
    return Response(
        msgspec.json.encode(error_body(error, request_id)),
        error.status,
        error.headers,
        media_type="application/json",
    )
