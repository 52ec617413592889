"""The calls between API processes and an engine with peers."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from quire.errors import RequestError
from quire.features.call import Callers, CallType, RequestField
from quire.features.disaggregation.facts import KVFacts
from quire.features.disaggregation.messages import ClosedGrant, Grant, PromptRequest, Welcome

_NO_PEERS = "this server asks no other server to compute prompts (--role)"


def _no_prompts() -> RequestError:
    return RequestError("this server computes no prompts for others (--role)", code="wrong_role")


def _no_peers() -> RequestError:
    return RequestError(_NO_PEERS, code="wrong_role")


class GrantRequest(msgspec.Struct, frozen=True):
    """A peer's request to compute a prompt. tenant, share: see `Request`."""

    asked: PromptRequest
    tenant: str = ""
    share: float = 1.0


HANDSHAKE: CallType[KVFacts, Welcome] = CallType(
    "disaggregation.handshake", KVFacts, Welcome, refusal=_no_prompts
)
"""Compares another engine's facts with this engine's. Raises PeerMismatchError if they differ."""
GRANT: CallType[GrantRequest, Grant] = CallType(
    "disaggregation.grant", GrantRequest, Grant, ClosedGrant, refusal=_no_prompts
)
"""Starts the computation of a prompt for another engine, which then fetches the KV. The second
answer comes when the grant ends."""
SET_PEERS: CallType[list[str], list[str]] = CallType(
    "disaggregation.set_peers", list[str], list[str], refusal=_no_peers
)
"""Replaces the servers that compute prompts for this engine. The answer is their addresses."""
CALLS = (HANDSHAKE, GRANT, SET_PEERS)


class PeerChoice(msgspec.Struct, frozen=True):
    """The choice of the server that computes a request's prompt.

    Attributes:
        peer: the peer's address; "": this engine computes it; None: the engine decides.
        traceparent: trace context for the peer; "" without a trace.
    """

    peer: str | None = None
    traceparent: str = ""


def _refuse_choice(choice: PeerChoice) -> RequestError | None:
    return RequestError(_NO_PEERS, "prefill") if choice.peer else None


PEER: RequestField[PeerChoice] = RequestField(
    "disaggregation.peer", PeerChoice, refusal=_refuse_choice
)
FIELDS = (PEER,)


async def grant(
    client: Callers,
    asked: GrantRequest,
    on_end: Callable[[ClosedGrant | None], None] | None = None,
) -> Grant:
    """Starts the computation of a prompt for another engine.

    Args:
        on_end: called once, with the end of the grant, or with None if the engine is gone.

    Raises:
        PeerMismatchError: the engine was restarted after the handshake.
        RequestError, OverloadedError, EngineDeadError: as `EngineClient.generate`.
    """
    return await client.first_alive.call(GRANT, asked, on_end)


async def set_peers(client: Callers, peers: list[str]) -> list[str]:
    """Sets the servers that compute prompts for this server's engines. Returns their addresses.

    Raises:
        RequestError: the engines do not ask peers (--role), or an address is invalid.
        EngineDeadError: an engine is gone.
    """
    known: list[str] = []
    for engine in client.replicas:
        known = await engine.call(SET_PEERS, peers)
    return known
