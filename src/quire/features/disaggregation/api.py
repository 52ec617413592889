"""The HTTP routes by which servers compute prompts for each other, and routers pair servers."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable
from typing import Annotated, TypeVar

import msgspec
from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from quire.features.disaggregation.calls import HANDSHAKE, GrantRequest, grant, set_peers
from quire.features.disaggregation.facts import KVFacts
from quire.features.disaggregation.messages import ClosedGrant, Grant, PromptRequest, Welcome
from quire.server.apis.route import Route, check_admin
from quire.server.context.request_context import RequestContext, context_of
from quire.server.context.request_trace import Handover, RequestTrace
from quire.server.errors import stuck_error
from quire.server.http.bodies import read_body
from quire.server.http.sse import json_response
from quire.server.http.strict_model import StrictModel
from quire.server.state import state_of

_TIMEOUT = 5.0
"""Seconds that the engine gets to answer."""
_MOST_NUMBER = 2**31 - 1

Answer = TypeVar("Answer")


class HandshakeBody(StrictModel):
    """Body of `/kv/handshake`; see `KVFacts`.

    A peer of another version may have other fields. The answer names the version, so unknown
    fields are no error.
    """

    model_config = ConfigDict(extra="ignore")

    protocol: int = Field(ge=0, le=_MOST_NUMBER)
    version: str = Field(max_length=64)
    transport: str = Field(max_length=32)
    model: str = Field(max_length=64)
    dtype: str = Field(max_length=32)
    kv_cache_dtype: str = Field(max_length=32)
    block_size: int = Field(ge=0, le=_MOST_NUMBER)
    groups: list[str] = Field(max_length=64)
    drafts: str = Field(default="", max_length=64)


class PrefillBody(StrictModel):
    """Body of `/kv/prefill`; see `PromptRequest`."""

    tokens: list[Annotated[int, Field(ge=0, le=_MOST_NUMBER)]]
    first: int = Field(ge=0, le=_MOST_NUMBER)
    reader: str = Field(max_length=64)
    epoch: str = Field(max_length=64)
    cache_salt: str = Field(default="", max_length=1024)
    weights: str = Field(default="", max_length=64)
    layers: bool = False


class PeersBody(StrictModel):
    """Body of PUT /kv/peers: addresses of the servers that compute prompts for this server."""

    peers: list[str] = Field(max_length=1024)


class PeersAnswer(msgspec.Struct):
    """Answer to PUT /kv/peers. peers: the peers' addresses, in the form of `x-quire-prefill`."""

    peers: list[str]


async def handshake(request: Request) -> Response:
    """Answers with this engine's facts, or 409 with both engines' values if they differ."""
    state = state_of(request)
    body = await read_body(request, HandshakeBody, state.args.max_body_bytes)
    facts = msgspec.convert(body.model_dump(), KVFacts)
    return json_response(await _in_time(state.client.call(HANDSHAKE, facts)))


async def prefill(request: Request) -> Response:
    """Takes a prompt, and answers with a grant before the prompt is computed. The request's trace
    ends with the grant: when the reader has taken the KV, or the grant has failed."""
    state = state_of(request)
    body = await read_body(request, PrefillBody, state.args.max_body_bytes)
    state.check_ready()
    context = context_of(request)
    asked, key = PromptRequest(**body.model_dump()), context.key
    on_end = None
    if (trace := context.trace) is not None:
        context.hold()
        on_end = functools.partial(_note_handover, context, trace, len(asked.tokens))
    granted = grant(state.client, GrantRequest(asked, key.name, key.share), on_end)
    try:
        return json_response(await _in_time(granted))
    except BaseException:
        if trace is not None:
            context.release()
        raise


def _note_handover(
    context: RequestContext, trace: RequestTrace, tokens: int, closed: ClosedGrant | None
) -> None:
    """Notes the end of a grant in its request's trace, and ends the trace."""
    now = time.perf_counter()
    if closed is None:
        trace.handover = Handover(context.began, now, tokens, "dead")
    else:
        begin = max(context.began, now - closed.seconds)
        computed = begin + closed.computed if closed.computed else None
        trace.handover = Handover(begin, now, tokens, closed.outcome, computed)
    context.release()


async def _in_time(answer: Awaitable[Answer]) -> Answer:
    try:
        async with asyncio.timeout(_TIMEOUT):
            return await answer
    except TimeoutError:
        raise stuck_error() from None


async def peers(request: Request) -> Response:
    """Replaces the servers that compute prompts for this one."""
    state = state_of(request)
    body = await read_body(request, PeersBody, state.args.max_body_bytes)
    return json_response(PeersAnswer(await _in_time(set_peers(state.client, body.peers))))


ROUTES = (
    Route("post", "/kv/handshake", handshake,
          "Compare two engines before one reads the other's blocks", HandshakeBody, Welcome),
    Route("post", "/kv/prefill", prefill, "Compute a prompt for another engine",
          PrefillBody, Grant),
    Route("put", "/kv/peers", peers, "Set the servers that compute prompts for this one (admins)",
          PeersBody, PeersAnswer, check=check_admin),
)  # fmt: skip
