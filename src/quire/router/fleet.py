"""The replicas behind a router: who they are, which of them are well, and who takes a request."""

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
"""Seconds until a replica that has no events for this router is asked again."""


class OtherModelError(QuireError):
    """A replica serves another model than the fleet."""


class UnknownReplicaError(QuireError):
    """The fleet has no replica of that name."""


@dataclass(frozen=True)
class FleetSettings:
    """policy: who takes a request. key: sent with questions of the router's own.
    replica_hosts: whose servers may join, see `ReplicaHosts`. check_seconds:
    from one look at a replica to the next. check_timeout: seconds until a replica that does not
    answer such a question is taken for lost. answer_timeout: seconds without a byte of an answer
    after which a request is given up. drain_timeout: seconds that a replica's requests have when it
    leaves."""

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
        hosts: whose servers may join.
        chooser: decides who takes a request.
        via: what the router adds to `Via` (RFC 9110, 7.6.3), by which it knows its own requests.
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
        """The model of its first replica that stays."""
        found = (r.model for r in self if r.model is not None and not r.leaving)
        return next(found, None)

    # -- members -------------------------------------------------------------------------------

    def join(self, url: str, role: Role = "both") -> RoutedReplica:
        """Takes a replica in, which gets requests once it is well. One that was there already is
        taken back if it was leaving, in its new role. Its address is trusted with the replicas'
        key. Raises ConfigError if the address is none."""
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
        """Takes in a replica that is well now. swap: it may serve another model, and all others
        leave.

        Raises:
            ConfigError: the address is none.
            ReplicaNotAllowedError: `replica_hosts` has it not.
            ReplicaLostError: it does not answer, is not ready, or does not prove that it has the
                replicas' key. Of an address that is not trusted it is not told which.
            OtherModelError: it serves another model.
        """
        upstream = Upstream(url, self.settings.connect_timeout)
        self.hosts.check(upstream.host, upstream.port)
        trusted = self.hosts.trusts(upstream.host, upstream.port)
        visitor = RoutedReplica(-1, upstream, trusted=trusted)
        try:
            await self._questions.look(visitor)
        except (NotReadyError, LateError, ReplicaLostError) as error:
            if trusted or visitor.proven:
                raise ReplicaLostError(str(error)) from None
            # The answer must not tell which ports are open, and what listens there.
            logger.warning("%s cannot join: %s", visitor.name, error)
            raise ReplicaLostError(
                "no server that can join is ready there; the router's log says more"
            ) from None
        finally:
            visitor.upstream.close()
        model = self.model
        if model not in (None, visitor.model) and not swap:
            theirs, ours = (model_names(each) for each in (visitor.model, model))
            raise OtherModelError(f"{visitor.name} serves {theirs}, this router {ours}")
        replica = self._join(Upstream(url, self.settings.connect_timeout), role)
        replica.model, replica.proven = visitor.model, visitor.proven
        replica.found_well()
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
            for task in replica.tasks:
                task.cancel()
            replica.upstream.close()

    # -- health and events ---------------------------------------------------------------------

    async def _watch(self, replica: RoutedReplica) -> None:
        """Looks at a replica again and again, until it has left."""
        while not self._gone(replica):
            try:
                await self._questions.look(replica)
                if self._differs(replica):
                    serves = model_names(replica.model)
                    logger.error("%s serves %s now: it leaves", replica.name, serves)
                    self.dismiss(replica.name)
                else:
                    await self._name_peers(replica)
                    replica.found_well()
            except UnreachableError as error:
                replica.unreachable(error)
            except ReplicaLostError as error:
                replica.lost(error)
            except NotReadyError as error:
                replica.refuses(error)
            except LateError as error:
                replica.late(error)
            except Exception:
                logger.exception("cannot look at %s", replica.name)
            replica.upstream.give_up_silent(self.settings.answer_timeout)
            await asyncio.sleep(self.settings.check_seconds)
        for task in replica.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        replica.upstream.close()
        del self.replicas[replica.name], self._by_number[replica.number]
        logger.info("replica %s has left", replica.name)

    def _differs(self, replica: RoutedReplica) -> bool:
        """Whether a replica serves another model than the others that stay."""
        others = (r.model for r in self if r is not replica and not r.leaving)
        model = next((each for each in others if each is not None), None)
        return not replica.leaving and model not in (None, replica.model)

    def _gone(self, replica: RoutedReplica) -> bool:
        waited = time.time() - replica.since > self.settings.drain_timeout
        return replica.leaving and (not replica.state.running or waited)

    async def _name_peers(self, replica: RoutedReplica) -> None:
        """Tells a replica that decodes who computes prompts, where that has changed."""
        if replica.role != "decode":
            replica.state.peers = {}
            return
        peers = [r for r in self if r.role == "prefill" and not r.leaving]
        urls = tuple(peer.upstream.url for peer in peers)
        if urls == replica.told_peers:
            return
        replica.state.peers = {}
        try:
            names = await self._questions.name_peers(replica, urls)
        except QuestionRefusedError as error:
            logger.error("%s computes its prompts itself: %s", replica.name, error)
        else:
            numbers = (peer.number for peer in peers)
            replica.state.peers = dict(zip(numbers, names, strict=True))
        replica.told_peers = urls

    async def _follow(self, replica: RoutedReplica) -> None:
        """Takes in a replica's events as long as it is there."""
        while True:
            pause = self.settings.check_seconds
            if replica.health != "lost":
                try:
                    await self._questions.follow(replica)
                except QuestionRefusedError as error:
                    logger.warning("what %s holds is estimated: %s", replica.name, error)
                    pause = _REFUSED_SECONDS
                except ReplicaLostError as error:
                    logger.info("no events of %s: %s", replica.name, error)
                except Exception:
                    logger.exception("cannot take in the events of %s", replica.name)
            await asyncio.sleep(pause)

    # -- requests ------------------------------------------------------------------------------

    def home(self) -> RoutedReplica | None:
        """Returns the replica that keeps what only one can keep, such as files."""
        return next((replica for replica in self if not replica.leaving), None)

    def place(
        self, prompt: Prompt, tried: Collection[RoutedReplica] = ()
    ) -> tuple[RoutedReplica, RouteChoice] | None:
        """Chooses replicas for a request, by the policy: the one that answers; None if none is left
        that was not tried. Where none is able, those that were slow, or else not ready, when they
        were last asked, are asked all the same: they know best, and there is nobody else."""
        left = [r for r in self if r.reachable and r not in tried]
        able: dict[int, ReplicaState] = {}
        for health in ("ready", "slow", "refusing"):
            able = able or {r.number: r.state for r in left if r.health == health}
        if not able:
            return None
        choice = self.chooser.choose(prompt, able)
        return self._by_number[choice.index], choice

    def learn(
        self, prompt: Prompt, choice: RouteChoice, tokens: int, blocks: Sequence[Block]
    ) -> None:
        """Takes note of the tokens and blocks of a prompt that is answered."""
        self.chooser.prefixes.learn(prompt, tokens, blocks)
        for placement in choice.placements:
            replica = self._by_number.get(placement.index)
            if replica is not None:
                replica.state.settle(prompt.keys, blocks)
