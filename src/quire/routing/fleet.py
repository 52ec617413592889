"""The replicas behind a router: which of them are well, what each does, and who takes a request."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

from quire.engine.router import Placement, Replica, cheapest
from quire.errors import QuireError
from quire.routing.prompts import Prompt
from quire.routing.upstream import Headers, ReplicaLostError, Upstream

Policy = Literal["prefix", "least-loaded", "round-robin"]

logger = logging.getLogger("quire.routing")


class OtherModelError(QuireError):
    """A replica serves another model than the fleet."""


class UnknownReplicaError(QuireError):
    """The fleet has no replica of that name."""


class ModelEntry(msgspec.Struct, frozen=True):
    """id: the name in the API. root: the checkpoint behind it. parent: of an adapter, its model."""

    id: str
    root: str | None = None
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[ModelEntry] = []


class _ReplicaLoad(msgspec.Struct):
    running: int
    waiting: int
    kv_tokens: int | None = None


Model = frozenset[ModelEntry]


@dataclass(frozen=True)
class FleetSettings:
    """policy: who takes a request. key: sent with questions of the router's own. check_seconds:
    from one look at a replica to the next. check_timeout: seconds until a replica that does not
    answer such a question is taken for lost. drain_timeout: seconds that a replica's requests have
    when it leaves."""

    policy: Policy = "prefix"
    key: str | None = None
    check_seconds: float = 1.0
    check_timeout: float = 5.0
    connect_timeout: float = 2.0
    drain_timeout: float = 120.0


class RoutedReplica:
    """A replica, by its address.

    Attributes:
        name: of the replica, its address without the scheme.
        well: whether it was ready when it was last asked.
        leaving: it gets no further requests.
        state: what the router estimates of it.
        reported: running and waiting requests, as it said last.
        model: what it serves, None until it is known.
    """

    def __init__(self, number: int, upstream: Upstream) -> None:
        self.number = number
        self.upstream = upstream
        self.name = upstream.url.partition("//")[2]
        self.well = False
        self.leaving = False
        self.state = Replica()
        self.reported = 0
        self.requests = self.failures = 0
        self.model: Model | None = None
        self.since = time.time()
        self.watch: asyncio.Task[None] | None = None

    @property
    def able(self) -> bool:
        return self.well and not self.leaving

    @property
    def load(self) -> int:
        """Requests that it has, from this router or from others."""
        return max(self.state.running, self.reported)

    def lost(self, why: object) -> None:
        """Takes note that it does not answer: what it held is gone."""
        self.failures += 1
        if self.well:
            logger.warning("replica %s is lost: %s", self.name, why)
        self.well = False
        self.state.forget()
        self.upstream.close()


class Fleet:
    """The replicas of one model. Not thread-safe; an event loop owns it."""

    def __init__(self, settings: FleetSettings) -> None:
        self.settings = settings
        self.replicas: dict[str, RoutedReplica] = {}
        self._numbers = itertools.count()
        self._turn = 0

    def __iter__(self) -> Iterator[RoutedReplica]:
        return iter(self.replicas.values())

    @property
    def model(self) -> Model | None:
        """The model of its first replica that stays."""
        found = (r.model for r in self if r.model is not None and not r.leaving)
        return next(found, None)

    # -- members -------------------------------------------------------------------------------

    def join(self, url: str) -> RoutedReplica:
        """Takes a replica in, which gets requests once it is well. One that was there already is
        taken back if it was leaving. Raises ConfigError if the address is none."""
        upstream = Upstream(url, self.settings.connect_timeout)
        known = next((r for r in self if r.upstream.url == upstream.url), None)
        if known is not None:
            known.leaving = False
            return known
        replica = RoutedReplica(next(self._numbers), upstream)
        self.replicas[replica.name] = replica
        replica.watch = asyncio.create_task(self._watch(replica))
        return replica

    async def admit(self, url: str, *, swap: bool) -> RoutedReplica:
        """Takes in a replica that is well now. swap: it may serve another model, and all others
        leave.

        Raises:
            ConfigError: the address is none.
            ReplicaLostError: it does not answer, or is not ready.
            OtherModelError: it serves another model.
        """
        visitor = RoutedReplica(-1, Upstream(url, self.settings.connect_timeout))
        try:
            await self._look(visitor)
        finally:
            visitor.upstream.close()
        model = self.model
        if model not in (None, visitor.model) and not swap:
            theirs, ours = (_names(each) for each in (visitor.model, model))
            raise OtherModelError(f"{visitor.name} serves {theirs}, this router {ours}")
        replica = self.join(url)
        replica.well, replica.model = True, visitor.model
        for other in list(self) if swap else ():
            if other is not replica:
                self.dismiss(other.name)
        return replica

    def dismiss(self, name: str) -> RoutedReplica:
        """Sends a replica no further requests; once it has none, it is forgotten. Raises
        UnknownReplicaError."""
        replica = self.replicas.get(name)
        if replica is None:
            raise UnknownReplicaError(f"there is no replica {name!r}")
        if not replica.leaving:
            replica.leaving = True
            replica.since = time.time()
            logger.info("replica %s leaves", name)
        return replica

    async def close(self) -> None:
        """Ends the watching of all replicas, and their idle connections."""
        for replica in self:
            if replica.watch is not None:
                replica.watch.cancel()
            replica.upstream.close()

    # -- health --------------------------------------------------------------------------------

    async def _watch(self, replica: RoutedReplica) -> None:
        """Looks at a replica again and again, until it has left."""
        while not self._gone(replica):
            try:
                await self._look(replica)
            except ReplicaLostError as error:
                replica.lost(error)
            except Exception:
                logger.exception("cannot look at %s", replica.name)
            else:
                if not replica.leaving and replica.model != self.model:
                    logger.error("%s serves %s now: it leaves", replica.name, _names(replica.model))
                    replica.leaving = True
                elif not replica.well:
                    logger.info("replica %s is ready", replica.name)
                    replica.since = time.time()
                    replica.well = True
            await asyncio.sleep(self.settings.check_seconds)
        replica.upstream.close()
        del self.replicas[replica.name]
        logger.info("replica %s has left", replica.name)

    def _gone(self, replica: RoutedReplica) -> bool:
        waited = time.time() - replica.since > self.settings.drain_timeout
        return replica.leaving and (not replica.state.running or waited)

    async def _look(self, replica: RoutedReplica) -> None:
        """Asks a replica whether it is ready, for its load, and once for its model. Raises
        ReplicaLostError."""
        await self._ask(replica, b"/ready")
        if replica.model is None or not replica.well:
            models = msgspec.json.decode(await self._ask(replica, b"/v1/models"), type=_Models)
            # Adapters come and go on each server by itself.
            replica.model = frozenset(m for m in models.data if m.parent is None)
        load = msgspec.json.decode(await self._ask(replica, b"/load"), type=_ReplicaLoad)
        replica.reported = load.running + load.waiting
        if load.kv_tokens is not None:
            replica.state.has_room(load.kv_tokens)

    async def _ask(self, replica: RoutedReplica, target: bytes) -> bytes:
        headers: Headers = []
        if self.settings.key:
            headers.append((b"authorization", b"Bearer " + self.settings.key.encode()))
        try:
            async with asyncio.timeout(self.settings.check_timeout):
                answer = await replica.upstream.send("GET", target, headers, b"")
                try:
                    body = b"".join([part async for part in answer.parts()])
                finally:
                    answer.close()
        except TimeoutError:
            raise ReplicaLostError(f"no answer to {target.decode()}") from None
        if answer.status != 200:
            raise ReplicaLostError(f"{target.decode()} answered {answer.status}")
        return body

    # -- requests ------------------------------------------------------------------------------

    def home(self) -> RoutedReplica | None:
        """Returns the replica that keeps what only one can keep, such as files."""
        return next((replica for replica in self if not replica.leaving), None)

    def place(
        self, prompt: Prompt, tried: Collection[RoutedReplica] = ()
    ) -> tuple[RoutedReplica, Placement] | None:
        """Chooses a replica for a request, by the policy; None if none is able that was not
        tried."""
        able = {r.number: r for r in self if r.able and r not in tried}
        if not able:
            return None
        self._turn += 1
        if self.settings.policy == "prefix":
            for replica in able.values():
                # Others' requests count as well, as far as they are known.
                replica.state.others = max(0, replica.reported - replica.state.running)
            states = {number: replica.state for number, replica in able.items()}
            placement = cheapest(states, prompt.keys, prompt.tokens, self._turn)
            return able[placement.index], placement
        turns = sorted(able)
        number = turns[self._turn % len(turns)]
        if self.settings.policy == "least-loaded":
            around = max(turns) + 1
            number = min(able, key=lambda n: (able[n].load, (n - self._turn) % around))
        return able[number], Placement(able[number].state, number, prompt.tokens)


def _names(model: Model | None) -> str:
    """Returns the names of a model, with the checkpoint where it is known."""
    entries = sorted(model or (), key=lambda entry: entry.id)
    return ", ".join(e.id if e.root in (None, e.id) else f"{e.id} ({e.root})" for e in entries)
