"""`Route`: all that the server says and decides about one of its routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from quire.server.context.request_context import context_of
from quire.server.errors import ApiError

Schema = dict[str, Any]
Handler = Callable[[Request], Awaitable[Response]]
Check = Callable[[Request], Awaitable[None]]

EVENTS = "text/event-stream"
FLAG: Schema = {"type": "string", "enum": ["true", "false"]}
"""Schema of a query parameter that is true or false."""
PAGE_QUERY: Mapping[str, Schema] = {
    "after": {"type": "string"},
    "order": {"type": "string", "enum": ["asc", "desc"]},
    "limit": {"type": "integer", "minimum": 1, "maximum": 100},
}
"""Schemas of the query parameters that `page_of` reads."""


@dataclass(frozen=True, slots=True)
class Route:
    """A route. The application, authentication and `/openapi.json` are made from it.

    Attributes:
        method: the HTTP method, in lower case.
        path: as FastAPI takes it.
        handler: reads the request and answers it; None if the playground adds the route.
        summary: what the route does, for `/openapi.json`; "" leaves the route out of it.
        body: the model that the handler reads.
        answer: the answer's type, or its media type if it is not JSON.
        stream: media type of the answer with `stream`.
        query: schemas of the query parameters.
        media: media type of the body.
        public: whether requests need no key on a server that has keys.
        check: refuses the request if its key may not call the route; None: any key may.
        counted: whether a request counts against its key's limits.
        queued: whether a counted request uses the engine, so that a full queue refuses it.
        answers_head: whether HEAD requests are answered too.
        playground: whether only a server with the playground has it.
        setting: field of `ServerArgs` without which the server does not have it; "": every server.
    """

    method: str
    path: str
    handler: Handler | None
    summary: str
    body: type[BaseModel] | None = None
    answer: Any = None
    stream: str | None = None
    query: Mapping[str, Schema] = field(default_factory=dict)
    media: str = "application/json"
    public: bool = False
    check: Check | None = None
    counted: bool = False
    queued: bool = True
    answers_head: bool = False
    playground: bool = False
    setting: str = ""

    @property
    def methods(self) -> list[str]:
        """The HTTP methods, in capitals."""
        return [self.method.upper(), "HEAD"] if self.answers_head else [self.method.upper()]

    @property
    def described_path(self) -> str:
        """The path as OpenAPI writes it: without converters."""
        return self.path.replace(":path}", "}")


async def check_admin(request: Request) -> None:
    """Raises ApiError, 403, unless the request's key is an admin's."""
    if not context_of(request).key.admin:
        raise ApiError(403, "This key is not an admin's.", code="not_an_admin")
