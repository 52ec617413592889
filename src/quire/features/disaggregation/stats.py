"""The statistics of transfers between engines."""

from __future__ import annotations

import msgspec

OUTCOMES = ("done", "refused", "overloaded", "timeout", "dead", "aborted", "broken")
"""The ends of grants and fetches.

- done: All blocks arrived.
- refused: The peer refused for a lasting reason.
- overloaded: The peer was busy, or this engine had no room for its blocks.
- timeout: The peer was silent for the length of a lease.
- dead: The peer cannot be reached, or its connection ended.
- aborted: The request ended meanwhile.
- broken: The peer sent an invalid message.
"""


class DisaggStats(msgspec.Struct):
    """Counts since the start.

    Attributes:
        grants_open: Grants open at present.
        fetches_open: Fetches open at present.
        slots_used: Blocks in the memory between engines, on their way out or in.
        grants: Ended grants, by outcome.
        fetches: Ended fetches, by outcome.
        blocks_sent: Blocks of all groups.
        blocks_received: Blocks of all groups.
        bytes_sent: Bytes of the blocks sent.
        bytes_received: Bytes of the blocks received.
        handover_seconds: Time of prompts from peers, without the time to compute them.
        ask_seconds: Time until the peers had agreed to compute these prompts.
        remote_tokens: Prompt tokens with KV from peers.
        local: Requests that computed their prompt here because a fetch failed.
        readers_refused: Readers whose facts did not match, or without a valid grant.
        peers_up: Peers that may be asked at present.
    """

    grants_open: int = 0
    fetches_open: int = 0
    slots_used: int = 0
    grants: dict[str, int] = {}
    fetches: dict[str, int] = {}
    blocks_sent: int = 0
    blocks_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    handover_seconds: float = 0.0
    ask_seconds: float = 0.0
    remote_tokens: int = 0
    local: int = 0
    readers_refused: int = 0
    peers_up: int = 0


LIVE_ROWS = {
    "grants_open": "Open grants",
    "fetches_open": "Open fetches",
    "slots_used": "Blocks between engines",
    "blocks_sent": "Blocks sent",
    "blocks_received": "Blocks received",
    "bytes_sent": "Bytes sent",
    "bytes_received": "Bytes received",
    "handover_seconds": "Time of handovers",
    "ask_seconds": "Time until peers agreed",
    "remote_tokens": "Prompt tokens from peers",
    "local": "Prompts computed here after all",
    "readers_refused": "Refused readers",
    "peers_up": "Peers that may be asked",
    **{f"grants.{outcome}": f"Grants: {outcome}" for outcome in OUTCOMES},
    **{f"fetches.{outcome}": f"Fetches: {outcome}" for outcome in OUTCOMES},
}
"""The names of the statistics in the live view."""
