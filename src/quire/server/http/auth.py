"""Authentication and rate limits of requests, before their routes run."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.context.api_keys import ApiKey, ApiKeys
from quire.server.context.request_context import context_in
from quire.server.errors import ApiError, stopping
from quire.server.http.error_handler import error_response, is_anthropic, route_of
from quire.server.http.hosts import HostCheck
from quire.server.state import ServerState


class AuthMiddleware:
    """Refuses requests without a valid key, and takes each request from its key's limit.

    The route is decided on the path as the router will see it, by exact match: no other spelling (a
    prefix, a doubled or a trailing slash) is taken for a public route.

    Args:
        public: paths whose requests need no key.
        counted: paths whose POST requests count against their key's limits.
        unqueued: counted paths that do not use the engine.
    """

    def __init__(
        self,
        app: ASGIApp,
        state: ServerState,
        *,
        public: frozenset[str],
        counted: frozenset[str],
        unqueued: frozenset[str],
    ) -> None:
        self.app = app
        self.state = state
        self.hosts = HostCheck(state.args)
        self.public = public
        self.counted = counted
        self.unqueued = unqueued

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # websockets: there are none
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            self._authorize(scope)
        except ApiError as error:
            self.state.metrics.count_error(error)
            await error_response(error, scope)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _authorize(self, scope: Scope) -> None:
        """Raises ApiError: 401, 403, 429, or 503 while the queue is full or the server stops."""
        path, context = route_of(scope), context_in(scope)
        if not context.batch:
            self.hosts.check(scope)
            if path in self.public:
                return
            context.key = self._key(scope)
        if scope["method"] == "POST" and path in self.counted:
            if self.state.draining:  # on a connection that was open before
                raise stopping()
            context.take_request()
            if path not in self.unqueued:
                self.state.check_room(context.tenant)
        else:
            context.read_limits()

    def _key(self, scope: Scope) -> ApiKey:
        keys = self.state.keys
        return (
            find_key(keys, scope, "--api-key or --api-key-file")
            if keys.required
            else (keys.anonymous)
        )


def find_key(keys: ApiKeys, scope: Scope, flags: str) -> ApiKey:
    """Returns the key that a request gives. flags: those that name the keys, for the error.

    Raises ApiError, 401.
    """
    given = secrets_in(scope)
    key = keys.find(given[0]) if len(given) == 1 else None
    if key is None:
        if not given:
            problem = "The API key is missing: send it as 'Authorization: Bearer KEY'"
        elif len(given) > 1:
            problem = "The request gives several API keys: send one"
        else:
            problem = "The API key is incorrect"
        raise ApiError(
            401,
            f"{problem}. The server was started with keys ({flags}).",
            code="invalid_api_key",
            retry=False,
        )
    return key


def secrets_in(scope: Scope) -> list[bytes]:
    """Returns the secrets that a request gives: as a bearer, or on Anthropic's routes in `x-api-
    key`.

    The same secret given both ways counts once.
    """
    found = []
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            found.append(key.strip() if scheme.lower() == b"bearer" else b"")
        elif name == b"x-api-key" and is_anthropic(route_of(scope)):
            found.append(value.strip())
    return found if len(found) < 2 else list(set(found))
