"""Error responses in Ollama's shape: `{"error": message}`."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from quire.server.errors import ApiError


class OllamaErrorBody(msgspec.Struct):
    error: str


def error_body(error: ApiError) -> OllamaErrorBody:
    """Returns the error in Ollama's shape, which has no field for the parameter's name."""
    message = str(error)
    if error.code == "model_not_found":
        message = f"model not found: {message}"  # Clients look for these words.
    if error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    return OllamaErrorBody(message)


def error_response(error: ApiError) -> Response:
    return Response(
        msgspec.json.encode(error_body(error)),
        error.status,
        error.headers,
        media_type="application/json",
    )
