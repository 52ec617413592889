"""The API keys of a router's clients, and how many requests each may make at the whole fleet."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

from quire.server.args import ServerArgs
from quire.server.errors import ApiError
from quire.server.middleware.api_keys import ApiKeys
from quire.server.middleware.auth import COUNTED_PATHS, PUBLIC_PATHS, secrets_in
from quire.server.middleware.error_handler import is_anthropic
from quire.server.middleware.rate_limits import RateLimiter
from quire.server.middleware.request_context import requests_exceeded
from quire.server.middleware.response_headers import limit_headers

Headers = list[tuple[bytes, bytes]]


class ClientKeys:
    """Refuses requests without a key of the file, and takes each from its key's limit.

    Paths are those of a server: what needs no key there needs none here, and what is counted there
    is counted here. Tokens are limited by the servers, which know them.

    Args:
        file: as of a server's `api_key_file`; None asks for no key.
        requests_per_minute: of keys for which the file names no limit; None is no limit.

    Raises:
        ConfigError: the file is wrong.
    """

    def __init__(self, file: str | None, requests_per_minute: int | None = None) -> None:
        args: dict[str, Any] = {"api_key_file": file, "requests_per_minute": requests_per_minute}
        self._keys = ApiKeys(ServerArgs(**args))
        self._limiter = RateLimiter()

    def reload(self) -> None:
        """Reads the file again; errors go to the log."""
        self._keys.reload()

    def close(self) -> None:
        self._limiter.close()

    def check(self, scope: Scope) -> Headers:
        """Returns headers of the answer that tell of the key's limit. Raises ApiError: 401, 429."""
        path = scope["path"]
        if path in PUBLIC_PATHS:
            return []
        key = self._keys.anonymous
        if self._keys.required:
            given = secrets_in(scope)
            found = self._keys.find(given[0]) if len(given) == 1 else None
            if found is None:
                raise ApiError(401, "Incorrect or missing API key.", code="invalid_api_key")
            key = found
        if key.requests_per_minute is None or scope["method"] != "POST":
            return []
        if path not in COUNTED_PATHS:
            return []
        taken, levels = self._limiter.take_request(key)
        if levels.requests is None:
            return []
        if not taken and levels.requests.remaining < 1:
            raise requests_exceeded(levels.requests)
        pairs = limit_headers("requests", levels.requests, is_anthropic(path))
        return [(name.encode(), value.encode()) for name, value in pairs]
