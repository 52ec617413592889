"""Authentication by a key: of every route but /health and the files of the playground."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server import playground
from quire.server.error_shapes import error_response, is_anthropic
from quire.server.errors import ApiError
from quire.server.metrics import ServerMetrics

PUBLIC_PATHS = frozenset({"/health", *playground.FILES})


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
        await error_response(error, scope.get("path", ""))(scope, receive, send)

    def allows(self, scope: Scope) -> bool:
        keys = _keys(scope)
        if len(keys) != 1:
            return False
        digest = _digest(keys[0])
        # No early exit: the time taken must not tell which key was close, or how close.
        return sum([hmac.compare_digest(digest, known) for known in self.digests]) > 0


def _keys(scope: Scope) -> list[bytes]:
    """The keys that a request gives: as a bearer, or on Anthropic's routes in `x-api-key`. Giving
    the same one both ways is giving one."""
    found = []
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            found.append(key.strip() if scheme.lower() == b"bearer" else b"")
        elif name == b"x-api-key" and is_anthropic(scope.get("path", "")):
            found.append(value.strip())
    return found if len(found) < 2 else list(set(found))


def _digest(key: bytes) -> bytes:
    """Hashing first makes all comparisons equally long."""
    return hashlib.sha256(key).digest()
