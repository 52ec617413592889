"""Bearer-key authentication of every route but /health."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.errors import ApiError, error_response
from quire.server.metrics import ServerMetrics

PUBLIC_PATHS = frozenset({"/health"})


class RequireKey:
    """Pure ASGI middleware. It decides on the path as the router will see it, by exact match, so
    that no spelling of a route (a prefix, a doubled or a trailing slash) can slip past it."""

    def __init__(self, app: ASGIApp, keys: Iterable[str], metrics: ServerMetrics) -> None:
        self.app = app
        self.metrics = metrics
        self.digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("path") in PUBLIC_PATHS or self.allows(scope):
            await self.app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        self.metrics.count_error(401)
        error = ApiError(401, "Incorrect or missing API key.", code="invalid_api_key")
        await error_response(error)(scope, receive, send)

    def allows(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        digest = _digest(key.strip())
        # No early exit: the time taken must not tell which key was close, or how close.
        return sum([hmac.compare_digest(digest, known) for known in self.digests]) > 0


def _digest(key: bytes) -> bytes:
    """Hashing first makes all comparisons equally long."""
    return hashlib.sha256(key).digest()
