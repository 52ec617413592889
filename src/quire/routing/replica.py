"""A replica behind a router: its address, what it serves and whether it is well."""

from __future__ import annotations

import asyncio
import logging
import time

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


class RoutedReplica:
    """A replica, by its address.

    Attributes:
        name: of the replica, its address without the scheme.
        well: whether it was ready when it was last asked.
        leaving: it gets no further requests.
        state: what the router knows of it.
        model: what it serves, None until it is known.
        told_peers: the addresses that it was last told to ask for prompts.
    """

    def __init__(self, number: int, upstream: Upstream, role: Role = "both") -> None:
        self.number = number
        self.upstream = upstream
        self.name = upstream.url.partition("//")[2]
        self.well = False
        self.leaving = False
        self.state = ReplicaState(role)
        self.requests = self.failures = 0
        self.model: Model | None = None
        self.told_peers: tuple[str, ...] | None = None
        self.since = time.time()
        self.tasks: list[asyncio.Task[None]] = []

    @property
    def role(self) -> Role:
        return self.state.role

    @property
    def able(self) -> bool:
        return self.well and not self.leaving

    def lost(self, why: object) -> None:
        """Takes note that it does not answer: what it held is gone."""
        self.failures += 1
        if self.well:
            logger.warning("replica %s is lost: %s", self.name, why)
        self.well = False
        self.told_peers = None
        self.state.forget()
        self.upstream.close()


def model_names(model: Model | None) -> str:
    """Returns the names of a model, with the checkpoint where it is known."""
    entries = sorted(model or (), key=lambda entry: entry.id)
    return ", ".join(e.id if e.root in (None, e.id) else f"{e.id} ({e.root})" for e in entries)
