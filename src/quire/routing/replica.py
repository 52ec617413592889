"""A replica behind a router: its address, what it serves and whether it is well."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import Literal

import msgspec

from quire.routing.replica_state import ReplicaState, Role
from quire.routing.upstream import Upstream

logger = logging.getLogger("quire.routing")


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
