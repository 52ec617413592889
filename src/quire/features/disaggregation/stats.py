"""The statistics of transfers between engines."""

from __future__ import annotations

import msgspec

OUTCOMES = ("done", "refused", "overloaded", "timeout", "dead", "aborted", "broken")
"""The ends of grants and fetches.

done: all blocks arrived. refused: the peer said no, for a reason that stays. overloaded: it said no
for now, or there was no room here for what it sent. timeout: it gave no sign for the length of a
lease. dead: it cannot be reached, or its connection ended. aborted: the request ended meanwhile.
broken: what came was no valid message.
"""


class DisaggStats(msgspec.Struct):
    """Counts since the start.

    grants_open, fetches_open: as they are now. slots_used: blocks in the memory between engines, of
    all groups, on their way out or in. grants, fetches: ended ones by outcome.
    blocks_sent, blocks_received: of all groups. bytes_sent, bytes_received: of these.
    handover_seconds: of prompts that came from peers, beyond those in which they were computed.
    ask_seconds: until the peers of these had agreed.
    remote_tokens: prompt tokens whose KV came from peers. local: requests whose prompt a peer was
    to compute and that computed it themselves. readers_refused: that did not match, or showed no
    grant of theirs. peers_up: peers that can be asked now.
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
