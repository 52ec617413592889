"""Errors for unknown paths and methods, which name the route to use instead."""

from __future__ import annotations

import re

from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from quire.server.errors import ApiError

_CHAT = "POST /v1/chat/completions"
_RESPONSES = "POST /v1/responses"

_DIALECTS: tuple[tuple[str, str, str | None], ...] = (
    ("/api/chat", "Ollama's API", _CHAT),
    ("/api/generate", "Ollama's API", "POST /v1/completions"),
    ("/api/embed", "Ollama's API", "POST /v1/embeddings"),
    ("/api/embeddings", "Ollama's API", "POST /v1/embeddings"),
    ("/api/tags", "Ollama's API", "GET /v1/models"),
    ("/api/ps", "Ollama's API", "GET /v1/models"),
    ("/api/show", "Ollama's API", "GET /v1/models"),
    ("/api/version", "Ollama's API", "GET /version"),
    ("/api", "Ollama's API", None),
    ("/v1/audio", "OpenAI's API of speech", None),
    ("/v1/realtime", "OpenAI's API of speech", None),
    ("/v1/images", "OpenAI's API of images", None),
    ("/v1/videos", "OpenAI's API of videos", None),
    ("/v1/moderations", "OpenAI's API of moderation", None),
    ("/v1/fine_tuning", "OpenAI's API of training", None),
    ("/v1/vector_stores", "OpenAI's API of hosted search", None),
    ("/v1/containers", "OpenAI's API of hosted tools", None),
    ("/v1/uploads", "OpenAI's API of uploads", "POST /v1/files"),
    ("/v1/assistants", "OpenAI's API of assistants", _RESPONSES),
    ("/v1/threads", "OpenAI's API of assistants", _RESPONSES),
    ("/v1/conversations", "OpenAI's API of conversations", _RESPONSES),
    ("/v1/engines", "OpenAI's first API", "GET /v1/models"),
    ("/openai/deployments", "Azure's API", _CHAT),
    ("/v1/complete", "Anthropic's first API", "POST /v1/messages"),
    ("/v1/messages/batches", "Anthropic's API of batches", "POST /v1/batches"),
    ("/v1beta", "Gemini's API", _CHAT),
    ("/classify", "vLLM's API", None),
    ("/v2/chat", "Cohere's API", _CHAT),
    ("/v2/embed", "Cohere's API", "POST /v1/embeddings"),
    ("/generate_stream", "TGI's API", "POST /generate"),
    ("/info", "TGI's API", "GET /version"),
    ("/completion", "llama.cpp's API", "POST /v1/completions"),
    ("/embedding", "llama.cpp's API", "POST /v1/embeddings"),
    ("/infill", "llama.cpp's API", "POST /v1/completions, with a suffix"),
    ("/props", "llama.cpp's API", "GET /server_info"),
    ("/slots", "llama.cpp's API", "GET /load"),
    ("/get_model_info", "SGLang's API", "GET /v1/models"),
    ("/invocations", "SageMaker's API", _CHAT),
)
"""Other APIs' routes: beginning of the path, name of the API, and the equivalent route here.

The first entry that matches is used.
"""

_HAS = (
    "This server has OpenAI's API (/v1/chat/completions, /v1/responses, /v1/completions, "
    "/v1/embeddings, /v1/models) and Anthropic's (/v1/messages); GET /openapi.json lists all of it."
)


def no_such_route(scope: Scope, path: str, routes: list[BaseRoute]) -> ApiError:
    """Returns the 404 for an unknown path.

    Args:
        path: the path without the root path.
        routes: the application's routes, which are searched for one with a similar path.
    """
    method, shown = scope["method"][:20], path[:200]
    similar = next((p for p in _similar(path) if _has_route(p, scope["method"], routes)), None)
    if similar is not None:
        return _error(f"There is no route '{method} {shown}'; there is {method} {similar[:200]}.")
    for begin, api, instead in _DIALECTS:
        if begin.startswith("/api") and _has_route("/api/chat", "POST", routes):
            continue
        if path == begin or path.startswith((f"{begin}/", f"{begin}:")):
            hint = _HAS if instead is None else f"Use {instead}."
            if begin.startswith("/api"):
                hint += " `quire serve --ollama-api 11434` adds Ollama's API."
            return _error(
                f"'{method} {shown}' is of {api}, which this server does not have. {hint}"
            )
    return _error(f"There is no route '{method} {shown}'. {_HAS}")


def no_such_method(scope: Scope, path: str, allowed: str) -> ApiError:
    """Returns the 405 for a path that has only routes with other methods.

    Args:
        allowed: those methods.
    """
    return ApiError(
        405,
        f"{scope['method'][:20]} is not possible at '{path[:200]}'; {allowed} is.",
        code="method_not_allowed",
    )


def _similar(path: str) -> list[str]:
    """Returns the paths that a client with a wrong base URL may have meant."""
    plain = re.sub(r"/+", "/", path).rstrip("/") or "/"
    bare = re.sub(r"^(/api)?(/v1)*(?=/)", "", plain)
    return [plain, f"/v1{bare}", bare]


def _has_route(path: str, method: str, routes: list[BaseRoute]) -> bool:
    scope = {"type": "http", "path": path, "root_path": "", "method": method}
    return any(route.matches(scope)[0] == Match.FULL for route in routes)


def _error(message: str) -> ApiError:
    return ApiError(404, message, code="no_such_route", retry=False)
