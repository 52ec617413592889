"""Cache hits of models with recurrent states, compared with attention only, on traces of shared
prefixes, shortened prefixes and conversations."""

from __future__ import annotations

from functools import cache

import pytest

from hybrid_prefixes import TRACES, Room, served
from tests.slow import slow

BOUND = 0.95
_THOUGHTS = "conversations without their thoughts"


@cache
def by_attention(name: str, blocks: int, host_blocks: int) -> int:
    return served(TRACES[name], Room(blocks, host_blocks=host_blocks)).reused


@pytest.mark.parametrize("states", [slow(200), 40])
@pytest.mark.parametrize("name", [slow(name) if name == _THOUGHTS else name for name in TRACES])
def test_reused_tokens(name: str, states: int) -> None:
    room = Room(states=states)
    hybrid, attention = served(TRACES[name], room).reused, by_attention(name, room.blocks, 0)
    assert attention > 0
    assert hybrid >= BOUND * attention, hybrid / attention


@pytest.mark.parametrize("name", ["conversations", slow("shortened prefix")])
def test_reused_tokens_with_a_host_tier(name: str) -> None:
    """The device has only a third of the blocks and states that the trace needs."""
    room = Room(blocks=207, states=26, host_blocks=700, host_states=76)
    hybrid = served(TRACES[name], room)
    attention = by_attention(name, room.blocks, room.host_blocks)
    assert attention > 0
    assert hybrid.reused >= BOUND * attention, hybrid.reused / attention
    assert hybrid.scheduler.blocks.evicted > 0
