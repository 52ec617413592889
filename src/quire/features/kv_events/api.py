"""The HTTP route by which routers read KV events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from quire.errors import EngineDeadError
from quire.features.kv_events.calls import kv_events
from quire.features.kv_events.messages import EngineLoad, KVEventLine, KVEvents
from quire.server.apis.route import Route, check_admin
from quire.server.http.query import Query
from quire.server.state import ServerState, state_of

_LOOK_SECONDS = 0.1
"""Seconds between two queries of the engines."""
_SILENT_SECONDS = 1.0
"""Most seconds between two lines. A reader that gets no line for longer knows that the server is
lost."""
_TIMEOUT = 5.0
"""Seconds that the engines get to answer."""

NDJSON = "application/x-ndjson"


async def events(request: Request) -> Response:
    """Streams the contents of the engines' caches, and then all changes of the caches and loads.
    Each line is a JSON object."""
    state = state_of(request)
    Query(request)
    state.check_alive()
    return StreamingResponse(_lines(state), media_type=NDJSON)


async def _lines(state: ServerState) -> AsyncIterator[bytes]:
    """Yields lines until an engine is lost or the server stops."""
    parts = state.args.kv_peers is not None
    grants, asks = parts and state.args.role != "decode", parts and state.args.role != "prefill"
    places: list[tuple[str, int]] = []
    loads: list[EngineLoad] = []
    silent = _SILENT_SECONDS
    while not state.draining:
        try:
            async with asyncio.timeout(_TIMEOUT):
                found: list[KVEvents] = await kv_events(state.client, places)
        except (EngineDeadError, TimeoutError):
            return
        now = [each.load for each in found]
        if silent >= _SILENT_SECONDS or now != loads or any(each.changed for each in found):
            places, loads, silent = [(each.epoch, each.last) for each in found], now, 0.0
            yield msgspec.json.encode(KVEventLine(grants, asks, found)) + b"\n"
        await asyncio.sleep(_LOOK_SECONDS)
        silent += _LOOK_SECONDS


ROUTES = (
    Route("get", "/kv/events", events, "Contents of the caches, and their changes (admins)",
          answer=NDJSON, check=check_admin),
)  # fmt: skip
