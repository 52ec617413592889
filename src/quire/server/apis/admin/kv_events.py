"""`/kv/events` and `/kv/peers`: what routers ask of engines, and tell them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from quire.errors import EngineDeadError
from quire.features.disaggregation.calls import set_peers
from quire.features.kv_events.calls import kv_events
from quire.features.kv_events.messages import EngineLoad, KVEventLine, KVEvents
from quire.server.errors import stuck_error
from quire.server.http.bodies import read_body
from quire.server.http.query import Query
from quire.server.http.sse import json_response
from quire.server.http.strict_model import StrictModel
from quire.server.state import ServerState, state_of

_LOOK_SECONDS = 0.1
"""From one look at the engines to the next."""
_SILENT_SECONDS = 1.0
"""Longest time without a line: who reads none for longer knows that the server is lost."""
_TIMEOUT = 5.0
"""Seconds that the engines get to answer."""

NDJSON = "application/x-ndjson"


class PeersBody(StrictModel):
    """Body of PUT /kv/peers: addresses of the servers that compute prompts for this one."""

    peers: list[str] = Field(max_length=1024)


class PeersAnswer(msgspec.Struct):
    """peers: their addresses, as requests name them (`x-quire-prefill`)."""

    peers: list[str]


async def peers(request: Request) -> Response:
    """Replaces the servers that compute prompts for this one."""
    state = state_of(request)
    body = await read_body(request, PeersBody, state.args.max_body_bytes)
    try:
        async with asyncio.timeout(_TIMEOUT):
            return json_response(PeersAnswer(await set_peers(state.client, body.peers)))
    except TimeoutError:
        raise stuck_error() from None


async def events(request: Request) -> Response:
    """Streams what the engines' caches hold, then every change of it and of their load: a JSON
    object in each line."""
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
