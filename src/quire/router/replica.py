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
        informed: the replica sends events. Then only requests in flight are estimated.
        reported: running and waiting requests, by its last report.
        grants: the replica computes prompts for others; True until it reports otherwise.
        load: load of all its engines together, by its last report.
        peers: maps the number of each prefill replica that it uses to its name for it.
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
        """Replaces the estimate for a prompt by the blocks that its answer reported.

        Only for a replica with events, because an event tells when such a block is evicted.

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

ready: it takes requests. slow: it has missed few checks. refusing: it answers that it is not ready.
lost: it does not answer, or is not a Quire server.
"""

_MAX_MISSED_CHECKS = 3
"""Health checks in a row without an answer in time after which a replica is lost.

Its requests are given up if no byte of any answer arrived in as many checks.
"""


class RoutedReplica:
    """A member of the fleet.

    Attributes:
        number: identifies the replica in choices; -1 before it has joined.
        name: its address without the scheme.
        upstream: the connections to it.
        health: result of the last health check.
        leaving: it gets no further requests.
        state: its cached blocks and load.
        model: the models that it serves; None until they are known.
        answers: number of its answers by HTTP status.
        failures: number of times it was found lost.
        trusted: the router's settings name its address, so it may get the replicas' key.
        proven: it has proved that it has the replicas' key, and was not lost after that.
        announced_peers: the prefill replicas' addresses that were last sent to it.
        since: time (`time.time`) at which it last became ready or began to leave.
        tasks: the tasks that check its health and read its events.
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
        """Tells whether requests may be sent to it if no replica is ready."""
        return self.health != "lost" and not self.leaving

    def mark_healthy(self) -> None:
        """Records that it is ready."""
        if not self.healthy:
            logger.info("replica %s is ready", self.name)
            self.since = time.time()
        self.health, self._late_checks = "ready", 0
        self._silent_checks, self.upstream.has_received = 0, False

    def set_model(self, model: Model) -> None:
        """Records its model. The cached blocks of a different model are forgotten."""
        if self.model not in (None, model):
            logger.warning("replica %s has changed its model to %s", self.name, model_names(model))
            self.state.forget()
        self.model = model

    def mark_not_ready(self, why: object) -> None:
        """Records that it answers, but takes no requests. Its cached blocks stay known."""
        if self.health != "refusing":
            logger.warning("replica %s is not ready: %s", self.name, why)
        # Its model is unknown until it was ready once, so it may be the wrong server.
        self.health = "lost" if self.model is None else "refusing"

    def mark_late(self, why: object) -> None:
        """Records that it missed a health check, as a very busy machine may."""
        self._late_checks += 1
        if self.health == "lost" or self._late_checks >= _MAX_MISSED_CHECKS:
            self.mark_lost(why)
        elif self.health != "slow":
            logger.warning("replica %s is slow: %s", self.name, why)
            self.health = "slow"
        self._count_silence()

    def mark_unreachable(self, why: object) -> None:
        """Records that its address does not respond at all."""
        self.mark_lost(why)
        self._count_silence()

    def mark_lost(self, why: object) -> None:
        """Records that it is lost. Its cached blocks are forgotten."""
        self.failures += 1
        if self.health != "lost":
            logger.warning("replica %s is lost: %s", self.name, why)
        self.health = "lost"
        self.proven = False
        self.announced_peers = None
        self.state.forget()
        self.upstream.close()

    def _count_silence(self) -> None:
        """Aborts its requests if no byte has arrived from it during several health checks.

        Such a replica hangs, or its host is gone. Nobody else would end the connections.
        """
        self._silent_checks = 0 if self.upstream.has_received else self._silent_checks + 1
        self.upstream.has_received = False
        if self._silent_checks >= _MAX_MISSED_CHECKS:
            self.upstream.abort_all()


def model_names(model: Model | None) -> str:
    """Returns the models' names for a message, with the checkpoints that are known."""
    entries = sorted(model or (), key=lambda entry: entry.id)
    return ", ".join(e.id if e.root in (None, e.id) else f"{e.id} ({e.root})" for e in entries)
