"""A replica as the router knows it: its cached blocks, its load, its model and its health."""

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
    """A replica's cached blocks and load, by its own events and by the estimates of `Replica`.

    Attributes:
        role: a prefill replica computes prompts for the decode replicas.
        informed: whether the replica sends events. Then the router estimates only the requests in
            flight.
        reported: number of running and waiting requests, by the last report.
        grants: whether the replica computes prompts for others; True until it reports otherwise.
        load: load of all of the replica's engines together, by the last report.
        peers: maps numbers of prefill replicas to the names by which this replica knows them.
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
        """Requests in flight on the replica, from this router or from others."""
        return max(self.running, self.reported)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that the replica has yet to compute, for this router or for others."""
        return max(self.waiting, self.load.prompt_tokens)

    def take_line(self, line: KVEventLine) -> None:
        """Applies one line of the replica's events."""
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
        """Records that the stream of events has ended."""
        self.informed = False
        self.load = EngineLoad()
        self._blocks = []

    def forget(self) -> None:
        super().forget()
        self.lose_events()

    def held_tokens(self, prompt: KnownPrompt) -> int:
        """Returns how many tokens of a prompt the replica has cached.

        Tokens of requests that it is still computing count too.
        """
        most, blocks, keys = 0, prompt.blocks, prompt.keys
        for held in self._blocks:
            if not blocks or blocks[0][1] not in held:
                continue
            # A replica that holds a block holds all blocks before it, so bisection finds the last.
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
        """Replaces the estimate for a prompt by the blocks that the prompt's answer reported.

        It is called only for replicas with events, which report when such a block is evicted.

        Args:
            keys: keys of the prompt's pieces.
            blocks: the prompt's blocks.
        """
        if self.informed and len(self._blocks) == 1:
            self._blocks[0].update(name for _, name in blocks)
            self.drop(keys)


logger = logging.getLogger("quire.router")


class ModelEntry(msgspec.Struct, frozen=True):
    """An entry of a replica's GET /v1/models.

    Attributes:
        id: the model's name in the API.
        root: digest or name of the checkpoint.
        parent: an adapter's base model; None for a model.
    """

    id: str
    root: str | None = None
    parent: str | None = None


Model = frozenset[ModelEntry]
Health = Literal["ready", "slow", "refusing", "lost"]
"""Result of a replica's last health check.

- ready: the replica takes requests.
- slow: it has missed a few checks in a row.
- refusing: it answers that it is not ready.
- lost: it does not answer, or it is not a Quire server.
"""

_MAX_MISSED_CHECKS = 3
"""A replica is lost after this many health checks in a row without an answer in time.

The router gives up its requests if no byte of any answer arrived during these checks.
"""


class RoutedReplica:
    """A member of the fleet.

    Attributes:
        number: identifies the replica in choices; -1 before the replica has joined.
        name: the address without the scheme.
        upstream: the connections to the replica.
        health: result of the last health check.
        leaving: whether the replica gets no further requests.
        state: the replica's cached blocks and load.
        model: the models that the replica serves; None until they are known.
        answers: number of the replica's answers by HTTP status.
        failures: how often the replica was lost.
        trusted: whether the router's settings name the address. The replica may then get the key.
        proven: whether the replica has proved to know the key, and was not lost since.
        announced_peers: addresses of prefill replicas in the last announcement to the replica.
        since: time (`time.time`) at which the replica last became ready or began to leave.
        tasks: the tasks that check the replica's health and read its events.
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
        self.announced_peers: tuple[str, ...] | None = None
        self.since = time.time()
        self.tasks: list[asyncio.Task[None]] = []
        self._late_checks = self._silent_checks = 0

    @property
    def role(self) -> Role:
        return self.state.role

    @property
    def healthy(self) -> bool:
        return self.health == "ready"

    @property
    def available(self) -> bool:
        return self.healthy and not self.leaving

    @property
    def reachable(self) -> bool:
        """Tells whether the replica may get requests if no replica is ready."""
        return self.health != "lost" and not self.leaving

    def mark_healthy(self) -> None:
        """Records that the replica is ready."""
        if not self.healthy:
            logger.info("replica %s is ready", self.name)
            self.since = time.time()
        self.health, self._late_checks = "ready", 0
        self._silent_checks, self.upstream.has_received = 0, False

    def set_model(self, model: Model) -> None:
        """Records the replica's model. Forgets the cached blocks if the model has changed."""
        if self.model not in (None, model):
            logger.warning("replica %s has changed its model to %s", self.name, model_names(model))
            self.state.forget()
        self.model = model

    def mark_not_ready(self, why: object) -> None:
        """Records that the replica answers, but takes no requests. Keeps its cached blocks."""
        if self.health != "refusing":
            logger.warning("replica %s is not ready: %s", self.name, why)
        # If the model is unknown, the replica was never ready, and it may be the wrong server.
        self.health = "lost" if self.model is None else "refusing"

    def mark_late(self, why: object) -> None:
        """Records that the replica missed a health check, which can happen on a busy machine."""
        self._late_checks += 1
        if self.health == "lost" or self._late_checks >= _MAX_MISSED_CHECKS:
            self.mark_lost(why)
        elif self.health != "slow":
            logger.warning("replica %s is slow: %s", self.name, why)
            self.health = "slow"
        self._count_silence()

    def mark_unreachable(self, why: object) -> None:
        """Records that the replica's address does not respond at all."""
        self.mark_lost(why)
        self._count_silence()

    def mark_lost(self, why: object) -> None:
        """Records that the replica is lost. Forgets its cached blocks."""
        self.failures += 1
        if self.health != "lost":
            logger.warning("replica %s is lost: %s", self.name, why)
        self.health = "lost"
        self.proven = False
        self.announced_peers = None
        self.state.forget()
        self.upstream.close()

    def _count_silence(self) -> None:
        """Aborts the replica's requests if no byte has arrived during several health checks.

        The replica hangs, or its host is gone. Nothing else would end the connections.
        """
        self._silent_checks = 0 if self.upstream.has_received else self._silent_checks + 1
        self.upstream.has_received = False
        if self._silent_checks >= _MAX_MISSED_CHECKS:
            self.upstream.abort_all()


def model_names(model: Model | None) -> str:
    """Returns the models' names for a message, each with its checkpoint if that is known."""
    entries = sorted(model or (), key=lambda entry: entry.id)
    return ", ".join(e.id if e.root in (None, e.id) else f"{e.id} ({e.root})" for e in entries)
