"""The API's errors in OpenAI's shape: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping

import msgspec
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from quire.errors import (
    BrokenLogitsError,
    CompilerBusyError,
    EngineDeadError,
    OverloadedError,
    PeerMismatchError,
    QuireError,
    RequestError,
    WeightsError,
)

logger = logging.getLogger("quire.server")


class ErrorInfo(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    error: ErrorInfo


class ApiError(QuireError):
    """An error answer: its HTTP status and the four fields of OpenAI's error object.

    Args:
        status: the HTTP status.
        message: the field `message`.
        param: the field `param`, the request's field with the error.
        code: the field `code`.
        kind: the field `type`; None derives it from the status.
        retry_after: seconds after which the client may send the request again.
        retry: False tells OpenAI's clients that a retry would not help.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        retry_after: float | None = None,
        retry: bool = True,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.kind = kind
        self.retry_after = retry_after
        self.retry = retry

    @property
    def body(self) -> ErrorBody:
        kind = self.kind or _KINDS.get(self.status)
        if kind is None:
            kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return ErrorBody(ErrorInfo(str(self), kind, self.param, self.code))

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer.

        The retry time is given in seconds, and for OpenAI's clients in milliseconds too.
        """
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
            headers["Retry-After-Ms"] = str(max(1, math.ceil(self.retry_after * 1000)))
        if not self.retry or self.status == 401:
            headers["X-Should-Retry"] = "false"
        return headers


_KINDS = {401: "authentication_error", 503: "service_unavailable_error", 504: "timeout_error"}

_NOT_FOUND = ("model_not_found", "adapter_not_found")
"""Codes of errors that are answered with 404."""

_RESTART_SECONDS = 10.0
"""Estimated seconds that the engine takes to start."""
_RETRY_SECONDS = 1.0
"""Seconds after which a full queue is likely to have room."""


def unsupported_error(param: str, why: str = "is not supported by this server") -> ApiError:
    return ApiError(400, f"'{param}' {why}.", param=param, code="unsupported_parameter")


def stuck_error() -> ApiError:
    """Returns the error for an engine that does not answer in time."""
    return ApiError(503, "The engine does not respond.", code="engine_stuck")


def stopping_error() -> ApiError:
    return ApiError(503, "The server is stopping.", code="stopping", retry_after=_RESTART_SECONDS)


def asleep_error() -> ApiError:
    return ApiError(
        503,
        "The engine sleeps until POST /wake_up.",
        code="asleep",
        retry_after=_RESTART_SECONDS,
    )


def unready_error(code: str, reason: str) -> ApiError:
    """Returns the error for an engine that lives but takes no requests for now."""
    return ApiError(503, reason, code=code, retry_after=_RETRY_SECONDS)


def engine_dead_error(end: str = "") -> ApiError:
    """Returns the error for a dead engine.

    Args:
        end: how the engine died; "" if unknown.
    """
    return ApiError(
        503,
        f"The engine has stopped{end and f' ({end})'}. If it is being started again, try later.",
        code="engine_dead",
        retry_after=_RESTART_SECONDS,
    )


def overloaded_error() -> ApiError:
    return ApiError(
        503,
        "The server has as many requests waiting as it may (--max-queue, --max-queue-tokens); try "
        "again later.",
        code="overloaded",
        retry_after=_RETRY_SECONDS,
    )


@contextlib.contextmanager
def rename_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Renames fields in the errors of its block to their names in another API.

    Args:
        names: maps parts of a field's path, as in chat completions, to their names in that API.
    """
    try:
        yield
    except (ApiError, RequestError) as error:
        api_error = as_api_error(error)
        param = api_error.param
        if param is None:
            raise
        for old, new in names.items():
            param = param.replace(old, new)
        message = str(error).replace(f"'{api_error.param}'", f"'{param}'")
        raise ApiError(api_error.status, message, param=param, code=api_error.code) from None


@contextlib.contextmanager
def blame_field(field: str) -> Iterator[None]:
    """Makes errors about the engine's parameter `prompt` name the request's `field` instead."""
    try:
        yield
    except RequestError as error:
        if error.param != "prompt":
            raise
        raise ApiError(400, str(error), param=field, code=error.code) from None


def as_api_error(error: BaseException) -> ApiError:
    """Returns the error to send to the client.

    An unexpected error becomes a 500 without details, because they could contain paths or another
    user's text. The details go to the log.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        status = 404 if error.code in _NOT_FOUND else 400
        return ApiError(status, str(error), param=error.param, code=error.code)
    if isinstance(error, OverloadedError):
        return overloaded_error()
    if isinstance(error, CompilerBusyError):
        return ApiError(503, str(error), code="grammars_busy", retry_after=_RETRY_SECONDS)
    if isinstance(error, BrokenLogitsError):
        return ApiError(500, str(error), code="broken_logits", retry=False)
    if isinstance(error, WeightsError):
        return ApiError(503, str(error), code="weights_incomplete")
    if isinstance(error, EngineDeadError):
        return engine_dead_error()
    if isinstance(error, PeerMismatchError):
        return ApiError(409, str(error), code="peer_mismatch", retry=False)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail))
    logger.error("unexpected error", exc_info=error)
    return ApiError(500, "Internal server error.", code="internal_error")


def from_validation(error: ValidationError) -> ApiError:
    """Returns the first of pydantic's errors; its field is named as in `messages[0].content`."""
    first = error.errors(include_url=False, include_input=False)[0]
    param = field_path(first["loc"])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, RequestError):
        if cause.param is not None:  # It is relative to the object at `loc`.
            return ApiError(
                400, str(cause), param=f"{param}.{cause.param}".strip("."), code=cause.code
            )
        message = f"Invalid value for '{param}': {cause}"
        return ApiError(400, message, param=param, code=cause.code or "invalid_value")
    if first["type"] == "extra_forbidden":
        return ApiError(
            400, f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter"
        )
    if first["type"] == "missing":
        return ApiError(
            400,
            f"Missing required parameter: '{param}'.",
            param=param,
            code="missing_required_parameter",
        )
    return ApiError(
        400, f"Invalid value for '{param}': {first['msg']}.", param=param, code="invalid_value"
    )


def field_path(location: tuple[int | str, ...]) -> str:
    """Joins a location to a path: ('messages', 0, 'content') -> 'messages[0].content'.

    Long names are cut, because clients can send any name.
    """
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part[:100]}" if path else part[:100]
    return path


def error_response(error: ApiError) -> Response:
    return Response(
        msgspec.json.encode(error.body), error.status, error.headers, media_type="application/json"
    )
