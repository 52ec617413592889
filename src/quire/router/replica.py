"""A replica as the router knows it: what it holds and has to do, by its events and by what was sent
to it since.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from quire.engine.process.placement import Replica
from quire.features.kv_events.messages import EngineLoad, KVEventLine, split
from quire.router.prefixes import Block, KnownPrompt
from quire.router.upstream import Upstream

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


# A replica behind a router: its address, what it serves and whether it is well.

logger = logging.getLogger("quire.router")


class ModelEntry(msgspec.Struct, frozen=True):
    """id: the name in the API. root: the checkpoint behind it, by a digest or a name. parent: of an
    adapter, its model."""

    id: str
    root: str | None = None
    parent: str | None = None


Model = frozenset[ModelEntry]
Health = Literal["ready", "slow", "refusing", "lost"]
"""A replica's last answer: that it is ready; none in time, since a short while; that it is not
ready; none at all, or one of something else."""

_MOST_LATE = 3
"""Looks in a row without an answer in time with which a replica is lost, and without a sign of life
with which its requests are given up."""


class RoutedReplica:
    """A replica, by its address.

    Attributes:
        name: of the replica, its address without the scheme.
        health: as it was last looked at.
        leaving: it gets no further requests.
        state: what the router knows of it.
        model: what it serves, None until it is known.
        answers: requests that it answered, by their status.
        trusted: whoever runs the router has named its address: it may have the replicas' key.
        proven: it has shown that it has the replicas' key, since it was lost last.
        told_peers: the addresses that it was last told to ask for prompts.
    """

    def __init__(
        self, number: int, upstream: Upstream, role: Role = "both", *, trusted: bool = True
    ) -> None:
        self.number = number
        self.trusted = trusted
        self.proven = False
        self.upstream = upstream
        self.name = upstream.url.partition("//")[2]
        self.health: Health = "lost"
        self.leaving = False
        self.state = ReplicaState(role)
        self.answers: Counter[int] = Counter()
        self.failures = 0
        self.model: Model | None = None
        self.told_peers: tuple[str, ...] | None = None
        self.since = time.time()
        self.tasks: list[asyncio.Task[None]] = []
        self._late = self._silent = 0

    @property
    def role(self) -> Role:
        return self.state.role

    @property
    def well(self) -> bool:
        return self.health == "ready"

    @property
    def able(self) -> bool:
        return self.well and not self.leaving

    @property
    def reachable(self) -> bool:
        """Whether requests may be sent to it where no replica is able."""
        return self.health != "lost" and not self.leaving

    def found_well(self) -> None:
        """Takes note that it is ready."""
        if not self.well:
            logger.info("replica %s is ready", self.name)
            self.since = time.time()
        self.health, self._late = "ready", 0
        self._silent, self.upstream.heard = 0, False

    def serves(self, model: Model) -> None:
        """Takes note of its model. What it held of another one is gone."""
        if self.model not in (None, model):
            logger.warning("replica %s serves %s now", self.name, model_names(model))
            self.state.forget()
        self.model = model

    def refuses(self, why: object) -> None:
        """Takes note that it answers, and takes no requests now. It keeps what it holds."""
        if self.health != "refusing":
            logger.warning("replica %s is not ready: %s", self.name, why)
        # One that never was ready may serve anything.
        self.health = "lost" if self.model is None else "refusing"

    def late(self, why: object) -> None:
        """Takes note that an answer did not come in time, as on a machine that is very busy."""
        self._late += 1
        if self.health == "lost" or self._late >= _MOST_LATE:
            self.lost(why)
        elif self.health != "slow":
            logger.warning("replica %s is slow: %s", self.name, why)
            self.health = "slow"
        self._count_silence()

    def unreachable(self, why: object) -> None:
        """Takes note that nothing is heard from its address."""
        self.lost(why)
        self._count_silence()

    def lost(self, why: object) -> None:
        """Takes note that it does not answer: what it held is gone."""
        self.failures += 1
        if self.health != "lost":
            logger.warning("replica %s is lost: %s", self.name, why)
        self.health = "lost"
        self.proven = False
        self.told_peers = None
        self.state.forget()
        self.upstream.close()

    def _count_silence(self) -> None:
        """Gives its requests up where nothing has come for some looks, not even a part of an
        answer: it stands still, or its host is gone, and nobody ends the connections."""
        self._silent = 0 if self.upstream.heard else self._silent + 1
        self.upstream.heard = False
        if self._silent >= _MOST_LATE:
            self.upstream.give_up()


def model_names(model: Model | None) -> str:
    """Returns the names of a model, with the checkpoint where it is known."""
    entries = sorted(model or (), key=lambda entry: entry.id)
    return ", ".join(e.id if e.root in (None, e.id) else f"{e.id} ({e.root})" for e in entries)
