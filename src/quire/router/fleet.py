"""The replicas behind a router: membership, health checks, and the choice for each request."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from quire.errors import QuireError
from quire.router.choice import Chooser, RouteChoice, RoutePolicy
from quire.router.prefixes import Block
from quire.router.prompts import Prompt
from quire.router.questions import LateError, NotReadyError, QuestionRefusedError, Questions
from quire.router.replica import Model, ReplicaState, Role, RoutedReplica, model_names
from quire.router.replica_hosts import ReplicaHosts
from quire.router.upstream import ReplicaLostError, UnreachableError, Upstream

logger = logging.getLogger("quire.router")

_REFUSED_SECONDS = 30.0
"""Seconds until the router asks a replica again that refused to send its events."""


class OtherModelError(QuireError):
    """A replica serves a different model from the fleet's."""


class UnknownReplicaError(QuireError):
    """The fleet has no replica of that name."""


@dataclass(frozen=True)
class FleetSettings:
    """Settings of a fleet.

    Attributes:
        policy: how a replica is chosen for a request.
        key: API key that the router sends with its own requests to replicas.
        replica_hosts: hosts whose servers may join, see `ReplicaHosts`.
        check_seconds: pause between two health checks of a replica.
        check_timeout: seconds that a replica has to answer a health check.
        connect_timeout: seconds that a connection to a replica may take.
        answer_timeout: seconds without a byte of an answer after which the router gives up.
        drain_timeout: seconds in which the requests of a leaving replica may finish.
    """

    policy: RoutePolicy = "prefix"
    key: str | None = None
    replica_hosts: tuple[str, ...] = ()
    check_seconds: float = 1.0
    check_timeout: float = 5.0
    connect_timeout: float = 2.0
    answer_timeout: float = 600.0
    drain_timeout: float = 120.0


class Fleet:
    """The replicas of one model. Not thread-safe; an event loop owns it.

    Attributes:
        replicas: the replicas by name.
        hosts: decides which servers may join.
        chooser: chooses the replicas for a request.
        via: value that the router adds to `Via` (RFC 9110, 7.6.3). It recognizes its own requests
            by this value.
    """

    def __init__(self, settings: FleetSettings) -> None:
        self.settings = settings
        self.replicas: dict[str, RoutedReplica] = {}
        self.hosts = ReplicaHosts(settings.replica_hosts)
        self.chooser = Chooser(settings.policy)
        self.via = b"1.1 quire-" + secrets.token_hex(8).encode()
        self._questions = Questions(settings.key, settings.check_timeout, self.via)
        self._numbers = itertools.count()
        self._by_number: dict[int, RoutedReplica] = {}

    def __iter__(self) -> Iterator[RoutedReplica]:
        return iter(self.replicas.values())

    @property
    def model(self) -> Model | None:
        """The model of the first replica that is not leaving; None while no model is known."""
        found = (r.model for r in self if r.model is not None and not r.leaving)
        return next(found, None)

    # -- members -------------------------------------------------------------------------------

    def join(self, url: str, role: Role = "both") -> RoutedReplica:
        """Adds a replica, which gets requests once it is healthy.

        The router trusts its address with the replicas' key. A replica that is leaving stays, in
        the new role.

        Raises:
            ConfigError: `url` is not an address.
        """
        upstream = Upstream(url, self.settings.connect_timeout)
        self.hosts.trust(upstream.host, upstream.port)
        return self._join(upstream, role)

    def _join(self, upstream: Upstream, role: Role) -> RoutedReplica:
        known = next((r for r in self if r.upstream.url == upstream.url), None)
        if known is not None:
            known.leaving, known.state.role = False, role
            return known
        trusted = self.hosts.trusts(upstream.host, upstream.port)
        replica = RoutedReplica(next(self._numbers), upstream, role, trusted=trusted)
        self.replicas[replica.name] = self._by_number[replica.number] = replica
        replica.tasks = [asyncio.create_task(each(replica)) for each in (self._watch, self._follow)]
        return replica

    async def admit(self, url: str, role: Role = "both", *, swap: bool) -> RoutedReplica:
        """Adds a replica after a health check.

        Args:
            swap: the replica may serve another model, and all other replicas leave.

        Raises:
            ConfigError: `url` is not an address.
            ReplicaNotAllowedError: `replica_hosts` does not name the address.
            ReplicaLostError: the server does not answer, is not ready, or does not prove that it
                has the replicas' key. For an untrusted address the error does not say which.
            OtherModelError: it serves another model.
        """
        upstream = Upstream(url, self.settings.connect_timeout)
        self.hosts.check(upstream.host, upstream.port)
        trusted = self.hosts.trusts(upstream.host, upstream.port)
        candidate = RoutedReplica(-1, upstream, trusted=trusted)
        try:
            await self._questions.check(candidate)
        except (NotReadyError, LateError, ReplicaLostError) as error:
            if trusted or candidate.proven:
                raise ReplicaLostError(str(error)) from None
            # The answer must not reveal which ports are open and what listens there.
            logger.warning("%s cannot join: %s", candidate.name, error)
            raise ReplicaLostError(
                "no server that can join is ready at this address; the router's log says why"
            ) from None
        finally:
            candidate.upstream.close()
        model = self.model
        if model not in (None, candidate.model) and not swap:
            theirs, ours = (model_names(each) for each in (candidate.model, model))
            raise OtherModelError(f"{candidate.name} serves {theirs}, this router {ours}")
        replica = self._join(Upstream(url, self.settings.connect_timeout), role)
        replica.model, replica.proven = candidate.model, candidate.proven
        replica.mark_healthy()
        for other in list(self) if swap else ():
            if other is not replica:
                self.dismiss(other.name)
        return replica

    def dismiss(self, name: str) -> RoutedReplica:
        """Sends no further requests to a replica, and removes it once its requests have ended.

        Raises:
            UnknownReplicaError: no replica has this name.
        """
        replica = self.replicas.get(name)
        if replica is None:
            raise UnknownReplicaError(f"there is no replica {name!r}")
        if not replica.leaving:
            replica.leaving = True
            replica.since = time.time()
            logger.info("replica %s leaves", name)
        return replica

    async def close(self) -> None:
        """Ends all health checks and idle connections."""
        for replica in self:
            for task in replica.tasks:
                task.cancel()
            replica.upstream.close()

    # -- health and events ---------------------------------------------------------------------

    async def _watch(self, replica: RoutedReplica) -> None:
        """Checks a replica's health in a loop until it has left; then removes it."""
        while not self._has_drained(replica):
            try:
                await self._questions.check(replica)
                if self._serves_other_model(replica):
                    serves = model_names(replica.model)
                    logger.error("%s serves %s now, so it leaves", replica.name, serves)
                    self.dismiss(replica.name)
                else:
                    await self._announce_peers(replica)
                    replica.mark_healthy()
            except UnreachableError as error:
                replica.mark_unreachable(error)
            except ReplicaLostError as error:
                replica.mark_lost(error)
            except NotReadyError as error:
                replica.mark_not_ready(error)
            except LateError as error:
                replica.mark_late(error)
            except Exception:
                logger.exception("the health check of %s failed", replica.name)
            replica.upstream.abort_silent(self.settings.answer_timeout)
            await asyncio.sleep(self.settings.check_seconds)
        for task in replica.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        replica.upstream.close()
        del self.replicas[replica.name], self._by_number[replica.number]
        logger.info("replica %s has left", replica.name)

    def _serves_other_model(self, replica: RoutedReplica) -> bool:
        """Tells whether a replica serves another model than the replicas that are not leaving."""
        others = (r.model for r in self if r is not replica and not r.leaving)
        model = next((each for each in others if each is not None), None)
        return not replica.leaving and model not in (None, replica.model)

    def _has_drained(self, replica: RoutedReplica) -> bool:
        """Tells whether a leaving replica has no requests left, or has used up its drain time."""
        overdue = time.time() - replica.since > self.settings.drain_timeout
        return replica.leaving and (not replica.state.running or overdue)

    async def _announce_peers(self, replica: RoutedReplica) -> None:
        """Sends a decode replica the addresses of the prefill replicas, if they have changed."""
        if replica.role != "decode":
            replica.state.peers = {}
            return
        peers = [r for r in self if r.role == "prefill" and not r.leaving]
        urls = tuple(peer.upstream.url for peer in peers)
        if urls == replica.announced_peers:
            return
        replica.state.peers = {}
        try:
            names = await self._questions.announce_peers(replica, urls)
        except QuestionRefusedError as error:
            logger.error("replica %s computes its own prompts: %s", replica.name, error)
        else:
            numbers = (peer.number for peer in peers)
            replica.state.peers = dict(zip(numbers, names, strict=True))
        replica.announced_peers = urls

    async def _follow(self, replica: RoutedReplica) -> None:
        """Reads a replica's events until the task is cancelled, and reconnects when they end."""
        while True:
            pause = self.settings.check_seconds
            if replica.health != "lost":
                try:
                    await self._questions.follow_events(replica)
                except QuestionRefusedError as error:
                    logger.warning("cached blocks of %s are estimated: %s", replica.name, error)
                    pause = _REFUSED_SECONDS
                except ReplicaLostError as error:
                    logger.info("no events from %s: %s", replica.name, error)
                except Exception:
                    logger.exception("cannot read the events of %s", replica.name)
            await asyncio.sleep(pause)

    # -- requests ------------------------------------------------------------------------------

    def home(self) -> RoutedReplica | None:
        """Returns the replica that stores files and batches, which only one replica can do."""
        return next((replica for replica in self if not replica.leaving), None)

    def place(
        self, prompt: Prompt, tried: Collection[RoutedReplica] = ()
    ) -> tuple[RoutedReplica, RouteChoice] | None:
        """Chooses the replicas for a request by the policy.

        If no replica is ready, slow ones are tried, and after those the ones that refused. Their
        state may have changed since the last health check, and no other replica is left.

        Args:
            tried: replicas that have failed for this request.

        Returns:
            The replica that answers, and the choice; None if every reachable replica was tried.
        """
        left = [r for r in self if r.reachable and r not in tried]
        candidates: dict[int, ReplicaState] = {}
        for health in ("ready", "slow", "refusing"):
            candidates = candidates or {r.number: r.state for r in left if r.health == health}
        if not candidates:
            return None
        choice = self.chooser.choose(prompt, candidates)
        return self._by_number[choice.index], choice

    def has_more(self, tried: Collection[RoutedReplica]) -> bool:
        """Tells whether a replica that was not tried could take a request."""
        return any(r.reachable and r.health != "refusing" and r not in tried for r in self)

    def learn(
        self, prompt: Prompt, choice: RouteChoice, tokens: int, blocks: Sequence[Block]
    ) -> None:
        """Records the tokens and blocks of a prompt whose answer has begun."""
        self.chooser.prefixes.learn(prompt, tokens, blocks)
        for placement in choice.placements:
            replica = self._by_number.get(placement.index)
            if replica is not None:
                replica.state.settle(prompt.keys, blocks)
