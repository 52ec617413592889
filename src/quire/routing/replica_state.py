"""A replica as the router knows it: what it holds and has to do, by its events and by what was sent
to it since."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from quire.engine.process.placement import Replica
from quire.features.kv_events.messages import EngineLoad, KVEventLine, split
from quire.routing.prefixes import Block, KnownPrompt

Role = Literal["both", "prefill", "decode"]


class ReplicaState(Replica):
    """Knows of one replica what `Replica` estimates, and what its events say.

    Attributes:
        role: prefill computes prompts for those with role decode.
        informed: its events come. Then the estimate is of requests under way only.
        reported: running and waiting requests, as it said last.
        grants: it computes prompts for others, as far as is known.
        load: of all its engines, as it said last.
        peers: by the numbers of replicas that it asks for prompts, their names there.
    """

    def __init__(self, role: Role = "both") -> None:
        super().__init__()
        self.role = role
        self.informed = False
        self.reported = 0
        self.grants = True
        self.load = EngineLoad()
        self.peers: dict[int, str] = {}
        self._blocks: list[set[bytes]] = []

    @property
    def busy(self) -> int:
        """Requests that it has, from this router or from others."""
        return max(self.running, self.reported)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are to be computed, from this router or from others."""
        return max(self.waiting, self.load.prompt_tokens)

    def take_line(self, line: KVEventLine) -> None:
        """Takes in what it says."""
        if len(line.engines) != len(self._blocks):
            self._blocks = [set() for _ in line.engines]
        for held, events in zip(self._blocks, line.engines, strict=True):
            if events.reset:
                held.clear()
            held.difference_update(split(events.removed))
            held.update(split(events.stored))
        self.grants = line.grants
        loads = [events.load for events in line.engines]
        if len(loads) == 1:
            self.load = loads[0]
        elif loads:
            self.load = EngineLoad(
                running=sum(load.running for load in loads),
                waiting=sum(load.waiting for load in loads),
                prompt_tokens=sum(load.prompt_tokens for load in loads),
                prefill_rate=sum(load.prefill_rate for load in loads),
                kv_tokens=sum(load.kv_tokens for load in loads),
                handover_seconds=max(load.handover_seconds for load in loads),
                handover_token_seconds=max(load.handover_token_seconds for load in loads),
            )
        self.reported = self.load.running + self.load.waiting
        self.informed = True

    def lose_events(self) -> None:
        """Takes note that its events do not come any more."""
        self.informed = False
        self.load = EngineLoad()
        self._blocks = []

    def forget(self) -> None:
        super().forget()
        self.lose_events()

    def held_tokens(self, prompt: KnownPrompt) -> int:
        """Returns how many tokens of a prompt it holds, or will when it has computed what it was
        sent."""
        most, blocks, keys = 0, prompt.blocks, prompt.keys
        for held in self._blocks:
            if not blocks or blocks[0][1] not in held:
                continue
            # It holds all blocks before one that it holds.
            low, high = 1, len(blocks)
            while low < high:
                middle = (low + high) // 2
                if blocks[middle][1] in held:
                    low = middle + 1
                else:
                    high = middle
            most = max(most, blocks[low - 1][0])
        if keys and keys[0] in self._held:
            most = max(most, int(self.held_pieces(keys) * prompt.piece_tokens))
        return min(prompt.tokens, most)

    def settle(self, keys: Sequence[bytes], blocks: Sequence[Block]) -> None:
        """Replaces the estimate for a prompt that is answered by its blocks, where events come and
        will tell of their end."""
        if self.informed and len(self._blocks) == 1:
            self._blocks[0].update(name for _, name in blocks)
            self.drop(keys)
