"""Authentication and rate limits of requests, before their routes run."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.context.api_keys import ApiKey, ApiKeys
from quire.server.context.request_context import context_in
from quire.server.errors import ApiError, stopping_error
from quire.server.http.error_handler import error_response, is_anthropic, route_of
from quire.server.http.hosts import HostCheck
from quire.server.state import ServerState


class AuthMiddleware:
    """Refuses requests without a valid key, and charges each request to its key's limit.

    A path is public only if it matches a public route exactly, in the form in which the router sees
    it. A prefix, a doubled slash or a trailing slash does not match.

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
        try:
            if scope["type"] == "websocket":
                self._authorize_socket(scope)
            else:
                self._authorize(scope)
        except ApiError as error:
            self.state.metrics.count_error(error)
            await error_response(error, scope)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _authorize_socket(self, scope: Scope) -> None:
        """Checks a WebSocket's host, origin and key. Its turns are authorized again, one by one.

        Raises:
            ApiError: 401 or 403; 503 while the server stops.
        """
        self.hosts.check_socket(scope)
        self._find_key(scope)
        if self.state.draining:
            raise stopping_error()

    def _authorize(self, scope: Scope) -> None:
        """Checks a request's host and key, and charges it to the key's limit.

        Raises:
            ApiError: 401, 403 or 429; 503 while the queue is full or the server stops.
        """
        path, context = route_of(scope), context_in(scope)
        if not context.batch:
            self.hosts.check(scope)
            if path in self.public:
                return
            context.key = self._find_key(scope)
        if scope["method"] == "POST" and path in self.counted:
            if self.state.draining:  # The connection was open before the server began to stop.
                raise stopping_error()
            context.take_request()
            if path not in self.unqueued:
                self.state.check_room(context.tenant)
        else:
            context.read_limits()

    def _find_key(self, scope: Scope) -> ApiKey:
        keys = self.state.keys
        return (
            find_key(keys, scope, "--api-key or --api-key-file")
            if keys.required
            else (keys.anonymous)
        )


def find_key(keys: ApiKeys, scope: Scope, flags: str) -> ApiKey:
    """Returns the API key of a request.

    Args:
        flags: the flags that define the keys, for the error.

    Raises:
        ApiError: 401.
    """
    secrets = secrets_in(scope)
    key = keys.find(secrets[0]) if len(secrets) == 1 else None
    if key is None:
        if not secrets:
            problem = "The API key is missing: send it as 'Authorization: Bearer KEY'"
        elif len(secrets) > 1:
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
    """Returns the different secrets in a request's headers.

    They are in `Authorization`, and on Anthropic's routes in `x-api-key`. A secret that is in both
    counts once.
    """
    found = []
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            found.append(key.strip() if scheme.lower() == b"bearer" else b"")
        elif name == b"x-api-key" and is_anthropic(route_of(scope)):
            found.append(value.strip())
    return found if len(found) < 2 else list(set(found))
