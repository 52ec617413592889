"""The outermost middleware: request ids, deadlines, response headers and the access log."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.features.kv_events.prompt_report import (
    LOCAL,
    PREFILL_HEADER,
    PROMPT_HEADER,
    REPORT_HEADER,
)
from quire.server.context.api_keys import ApiKey
from quire.server.context.hints import HEADER, collect_hints
from quire.server.context.rate_limits import LimitStatus
from quire.server.context.request_context import (
    BATCH_KEY,
    SCOPE_KEY,
    RequestContext,
    duration,
    is_id,
)
from quire.server.errors import stopping_error
from quire.server.http.error_handler import error_response, is_anthropic, route_of
from quire.server.http.replica_proofs import TAG_HEADER, tag_in
from quire.server.http.usage_report import ASK_HEADER, add_usage
from quire.server.state import ServerState, new_id


def limit_headers(what: str, left: LimitStatus, anthropic: bool) -> Iterator[tuple[str, str]]:
    """Yields the headers that show one limit of a key, under the names of each API.

    Args:
        what: "requests" or "tokens".
        left: the limit, and what is left of it.
        anthropic: use the names of Anthropic's API instead of OpenAI's.
    """
    remaining = str(max(0, math.floor(left.remaining)))
    if anthropic:
        reset = datetime.now(UTC) + timedelta(seconds=left.refill)
        name = f"anthropic-ratelimit-{what}"
        yield f"{name}-limit", str(left.limit)
        yield f"{name}-remaining", remaining
        yield f"{name}-reset", reset.strftime("%Y-%m-%dT%H:%M:%SZ")
    else:
        yield f"x-ratelimit-limit-{what}", str(left.limit)
        yield f"x-ratelimit-remaining-{what}", remaining
        yield f"x-ratelimit-reset-{what}", duration(left.refill)


access = logging.getLogger("quire.access")

EXPOSED_HEADERS = [
    "x-request-id",
    "retry-after",
    "quire-ignored",
    *(
        f"x-ratelimit-{part}-{what}"
        for what in ("requests", "tokens")
        for part in ("limit", "remaining", "reset")
    ),
]
"""Response headers that scripts from allowed origins may read."""

_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_NO_ROUTE = "other"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_CLIENT_GONE = 499


class RequestContextMiddleware:
    """Creates a context for each request, and adds headers about it to the answer."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self.app = app
        self.state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # Some proxies leave the root path on the request's path. Starlette removes it from there.
        scope["root_path"] = self.state.args.root_path
        context = scope[SCOPE_KEY] = self._context(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                headers = [
                    *message.get("headers", ()),
                    *_headers(context, is_anthropic(route_of(scope))),
                ]
                message = {**message, "headers": headers}
            await send(add_usage(message, context) if context.wants_usage else message)

        try:
            await self.app(scope, receive, send_with_headers)
        except asyncio.CancelledError:
            # The drain time is over. If it were raised, uvicorn would log it with a traceback.
            if not self.state.draining:
                raise
            if not context.status:
                await error_response(stopping_error(), scope)(scope, receive, send_with_headers)
        finally:
            context.release()
            self._count_request(scope, context)
            if access.isEnabledFor(logging.INFO):
                _log(scope, context)

    def _count_request(self, scope: Scope, context: RequestContext) -> None:
        """Counts the request under its route's template.

        Clients choose paths and methods freely, so these must not become labels of metrics.
        """
        route = getattr(scope.get("route"), "path", _NO_ROUTE)
        method = scope["method"] if scope["method"] in _METHODS else _NO_ROUTE
        seconds = time.perf_counter() - context.began
        for name in context.hints.ignored if context.hints is not None else ():
            self.state.metrics.ignored.labels(name).inc()
        self.state.metrics.count_http(route, method, context.status or _CLIENT_GONE, seconds)

    def _context(self, scope: Scope) -> RequestContext:
        timeout, tracing = self.state.args.request_timeout, self.state.tracing
        batch_key: ApiKey | None = scope.get(BATCH_KEY)
        if batch_key is not None:
            timeout = None  # Batches have their own time limit.
        trace = None if tracing is None else tracing.begin(route_of(scope), scope)
        on_end = None
        if tracing is not None and trace is not None:
            on_end = functools.partial(tracing.export, trace)
        context = RequestContext(
            id=_client_request_id(scope) or new_id("req", "_"),
            key=batch_key or self.state.keys.anonymous,
            batch=batch_key is not None,
            rate_limiter=self.state.rate_limiter,
            deadline=None if timeout is None else time.monotonic() + timeout,
            trace=trace,
            on_end=on_end,
            hints=collect_hints(self.state.args.strict_fields),
        )
        _read_routing(scope, context, peers=self.state.args.kv_peers is not None)
        return context


def _client_request_id(scope: Scope) -> str | None:
    """Returns the client's request id; None if it is missing or invalid."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text: str = value.decode("latin-1")
            return text if is_id(text) else None
    return None


def _read_routing(scope: Scope, context: RequestContext, *, peers: bool) -> None:
    """Reads a router's headers: which peer computes the prompt, and which reports it wants.

    Args:
        peers: peers may compute prompts. The trace is then passed on to them.
    """
    context.tag = tag_in(scope["headers"]) or b""
    for name, value in scope["headers"]:
        if name == PREFILL_HEADER:
            context.prefill = value.decode("latin-1").removeprefix(LOCAL)
        elif name == REPORT_HEADER:
            context.wants_report = True
        elif name == ASK_HEADER:
            context.wants_usage = True
        elif name == b"traceparent" and peers and _TRACEPARENT.fullmatch(value):
            context.traceparent = value.decode()


def _headers(context: RequestContext, anthropic: bool) -> Iterator[tuple[bytes, bytes]]:
    yield b"x-request-id", context.id.encode()
    if context.tag:
        yield TAG_HEADER, context.tag
    if context.report:
        yield PROMPT_HEADER, context.report
    if context.hints is not None and context.hints.ignored:
        yield HEADER, context.hints.header
    if anthropic:
        yield b"request-id", context.id.encode()
    for what, left in (("requests", context.levels.requests), ("tokens", context.levels.tokens)):
        if left is not None:
            for name, value in limit_headers(what, left, anthropic):
                yield name.encode(), value.encode()


def _log(scope: Scope, context: RequestContext) -> None:
    client = scope.get("client")
    fields: dict[str, Any] = {
        "client": client[0] if client else "",
        "method": scope["method"],
        "path": scope["path"],
        "status": context.status,
        "seconds": round(time.perf_counter() - context.began, 6),
        "request_id": context.id,
        "key": context.key.name,
    }
    if context.prompt_tokens:
        fields |= {
            "prompt_tokens": context.prompt_tokens,
            "cached_tokens": context.cached_tokens,
            "completion_tokens": context.completion_tokens,
            "ttft": None if context.first_token is None else round(context.first_token, 6),
        }
    if context.end is not None:
        fields["end"] = context.end
    if context.prompts:
        fields["prompts"] = context.prompts
    access.info("%s %r", fields["method"], fields["path"], extra={"fields": fields})
