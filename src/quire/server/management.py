"""Routes for who runs the server: its version, its load, its settings and its cache."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire import __version__
from quire.config import EngineConfig
from quire.server.errors import ApiError
from quire.server.middleware.request_context import context_of
from quire.server.sse import json_response
from quire.server.state import ServerState, state_of

_TIMEOUT = 5.0
"""Seconds that the engine gets to answer."""


class ServerVersion(msgspec.Struct):
    version: str


class Load(msgspec.Struct):
    """Requests of all engines, a completion each. server_load: running and waiting ones."""

    server_load: int
    running: int
    waiting: int


class ServerInfo(msgspec.Struct):
    """engine: its settings, as they were resolved; `args` as they were given."""

    version: str
    model: str
    engine: EngineConfig


class CacheResetAnswer(msgspec.Struct):
    """reset: false where prefixes of requests that run are left."""

    reset: bool


async def version(request: Request) -> Response:
    return json_response(ServerVersion(__version__))


async def ping(request: Request) -> Response:
    """Answers as `/health` does, with an empty body."""
    state_of(request).check_alive()
    return Response(media_type="text/plain")


async def load(request: Request) -> Response:
    state = state_of(request)
    try:
        async with asyncio.timeout(_TIMEOUT):
            stats = await state.client.stats()
    except TimeoutError:
        raise _stuck() from None
    found = Load(stats.running + stats.waiting, stats.running, stats.waiting)
    return json_response(found)


async def server_info(request: Request) -> Response:
    state = _for_admins(request)
    config = state.client.config
    if config.args.disagg is not None:  # it has the peers' key
        config = replace(config, args=replace(config.args, disagg=None))
    return json_response(ServerInfo(__version__, state.model_name, config))


async def reset_prefix_cache(request: Request) -> Response:
    """Forgets all prefixes that no running request uses."""
    state = _for_admins(request)
    try:
        async with asyncio.timeout(_TIMEOUT):
            return json_response(CacheResetAnswer(await state.client.reset_prefix_cache()))
    except TimeoutError:
        raise _stuck() from None


def _for_admins(request: Request) -> ServerState:
    """Returns the state. Raises ApiError, 403, unless the request's key is an admin's."""
    if not context_of(request).key.admin:
        raise ApiError(403, "This key is not an admin's.", code="not_an_admin")
    return state_of(request)


def _stuck() -> ApiError:
    return ApiError(503, "The engine does not respond.", code="engine_stuck")
