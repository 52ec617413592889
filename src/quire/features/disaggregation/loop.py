"""The parts of prefill and decode apart in the engine's loop and in the scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from quire.arrays import Int32, int32
from quire.cache import BlockManager
from quire.config import EngineConfig
from quire.errors import ConfigError, PeerMismatchError, RequestError
from quire.executor import Capacity, Executor
from quire.features.disaggregation.exports import Exports
from quire.features.disaggregation.facts import differences, facts_of
from quire.features.disaggregation.free_slots import BlocksInPlace, FreeSlots, PeerSlots
from quire.features.disaggregation.listener import Listener
from quire.features.disaggregation.log_limit import LogLimit
from quire.features.disaggregation.messages import Grant, MemoryHandle, PromptRequest, Welcome
from quire.features.disaggregation.peer_list import PeerList
from quire.features.disaggregation.prompt_fetches import Brought, Ended, Fetches
from quire.features.disaggregation.pulls import PullThreads
from quire.features.disaggregation.reader_link import Heard, Inbox, ReaderLink, Stopped
from quire.features.disaggregation.settings import (
    DisaggSettings,
    check_engine,
    model_groups,
    read_settings,
)
from quire.features.disaggregation.stats import DisaggStats
from quire.features.loop_feature import Failure, LoopFeature
from quire.request import Request
from quire.runner.transfer.engine_memory import decode_memory, encode_memory
from quire.scheduler import Feature, PlanBuilder

_log = logging.getLogger(__name__)
_log.addFilter(LogLimit())


class DisaggFeature(Feature):
    """Hands the scheduler's calls on to the prompts that are computed for others, and by others."""

    def __init__(self, exports: Exports | None, fetches: Fetches | None) -> None:
        self._exports = exports
        self._fetches = fetches

    def attach(self, blocks: BlockManager, wake: Callable[[str], None]) -> None:
        if self._exports is not None:
            self._exports.attach(blocks)
        if self._fetches is not None:
            self._fetches.attach(blocks, wake)

    def admit(self, request: Request) -> None:
        if self._exports is not None:
            self._exports.admit(request)

    def fetch(self, request: Request, tokens: Int32, limit: int) -> bool:
        return self._fetches is not None and self._fetches.fetch(request, tokens, limit)

    def pending(self, idle: bool) -> bool:
        return any(part is not None and part.pending() for part in (self._exports, self._fetches))

    def plan(self, builder: PlanBuilder) -> None:
        for part in (self._exports, self._fetches):
            if part is not None:
                part.plan(builder)

    def transferred(self, finished: Sequence[int], failed: Sequence[int]) -> None:
        for part in (self._exports, self._fetches):
            if part is not None:
                part.transferred(finished, failed)

    def finish(self, request: Request) -> None:
        for part in (self._exports, self._fetches):
            if part is not None:
                part.finish(request)

    def forget(self) -> None:
        if self._fetches is not None:
            self._fetches.forget()


class DisaggLoop(LoopFeature):
    """Opens what the settings ask for, and answers peers.

    Messages (`on_control`): `handshake` with facts gives a `Welcome`; `grant` with a
    `PromptRequest` gives a `Grant`, whose request the caller adds; `revoke` undoes that;
    `closed_grants` gives those that ended since it was asked last.
    `set_peers` replaces the peers; `choose_peer` says, before a request is added, which of them
    computes its prompt, "" for none; `handover` gives the line of `HandoverTime`.
    """

    def __init__(self, config: EngineConfig) -> None:
        if config.args.kv_peers is None:
            raise ConfigError("kv_peers: there are no settings", "kv_peers")
        self._config = config
        self._settings = read_settings(config.args.kv_peers)
        check_engine(config)
        self._inbox: Inbox[Heard | Stopped | Brought | Ended] = Inbox()
        self._stats = DisaggStats()
        self._exports: Exports | None = None
        self._fetches: Fetches | None = None
        self._listener: Listener | None = None
        self._pulls: PullThreads | None = None
        self._slots: list[FreeSlots] = []

    def start(self, executor: Executor, capacity: Capacity) -> DisaggFeature:
        """Listens for readers, and makes ready to ask peers.

        Raises:
            ConfigError: the address cannot be had, or a peer's URL is none.
        """
        settings = self._settings
        pool = executor.control({"op": "staging_pool"})
        staged = settings.transport == "tcp"
        own = model_groups(self._config, capacity.groups)
        self._facts = facts_of(self._config, capacity.groups, pool.sizes, settings.transport, own)
        self._memory: bytes = b"" if staged else pool.memory
        if settings.layers:
            clock = executor.control({"op": "layer_clock"})
            self._memory = encode_memory(decode_memory(pool.memory).ranks, clock)
        if settings.grants:
            self._exports = self._open_exports(pool, staged, len(capacity.groups), own)
        if settings.asks:
            self._fetches = self._open_fetches(pool, staged, capacity)
        return DisaggFeature(self._exports, self._fetches)

    def _open_exports(self, pool: Any, staged: bool, groups: int, own: int) -> Exports:
        """Listens for readers. staged: blocks go through the pool. own: KV groups of the model."""
        settings = self._settings
        self._listener = Listener(
            settings.host,
            settings.port,
            pool.view if staged else None,
            self._inbox.put,
            self._inbox.wake,
            self._meet,
            settings.lease_timeout,
            lambda: 0 if self._exports is None else len(self._exports),
        )
        slots: PeerSlots = BlocksInPlace()
        if staged:
            slots = FreeSlots(groups, 0, _for_readers(settings, pool))
            self._slots.append(slots)
        _log.info("prompts for others: blocks at port %d", self._listener.port)
        return Exports(
            slots,
            pool.sizes,
            self._stats,
            lease=settings.lease_timeout,
            port=self._listener.port,
            chunks=settings.kv_transfer == "async",
            layers=settings.layers,
            memory=_handle(pool, groups) if staged else None,
            model_groups=own,
        )

    def _open_fetches(self, pool: Any, staged: bool, capacity: Capacity) -> Fetches:
        """Makes ready to ask peers. staged: blocks come through the pool."""
        settings = self._settings
        slots = None
        if staged:
            slots = FreeSlots(len(capacity.groups), _for_readers(settings, pool), pool.slots)
            self._slots.append(slots)
        peers = PeerList(settings.peers, settings.peer_key, self._facts)
        view = pool.view if staged else None
        self._pulls = PullThreads(peers, slots, view, self._inbox.put, settings.lease_timeout)
        least = settings.remote_prefill_tokens
        return Fetches(
            self._pulls,
            slots or BlocksInPlace(),
            pool.sizes,
            self._stats,
            least=capacity.full_step if least is None else least,
        )

    @property
    def waits(self) -> bool:
        return bool(self._fetches)

    def poll(self, patience: float) -> tuple[Sequence[str], Sequence[Failure]]:
        for event in self._inbox.drain():
            if isinstance(event, Heard | Stopped):
                if self._exports is not None:
                    self._exports.handle(event)
            elif self._fetches is not None:
                self._fetches.handle(event)
        return (), () if self._exports is None else self._exports.check()

    def fds(self) -> Sequence[int]:
        return (self._inbox.fd,)

    def _meet(self, link: ReaderLink, grant: Grant) -> None:
        """Greets a reader from a connection's thread."""
        if self._exports is not None:
            self._exports.meet(link, grant)

    def on_control(self, message: dict[str, Any]) -> Any:
        if self._exports is not None:
            answer = self._of_writer(self._exports, message)
            if answer is not None:
                return answer
        if self._fetches is not None and self._pulls is not None:
            return self._of_reader(self._fetches, self._pulls.peers, message)
        return None

    def _of_reader(self, fetches: Fetches, peers: PeerList, message: dict[str, Any]) -> Any:
        match message:
            case {"op": "handover"}:
                return fetches.handover.line
            case {"op": "set_peers", "peers": urls}:
                try:
                    peers.replace(urls)
                except ConfigError as error:
                    raise RequestError(str(error), "peers") from None
                _log.info("prompts are asked for at %s", ", ".join(peers.urls) or "no server")
                return peers.urls
            case {"op": "choose_peer", "request": request, "peer": peer, "traceparent": trace}:
                if peer and peer not in peers.urls:
                    raise RequestError(f"{peer} is no peer of this server", "prefill", "no_peer")
                fetches.choose(request, peer, trace)
                return True
        return None

    def _of_writer(self, exports: Exports, message: dict[str, Any]) -> Any:
        match message:
            case {"op": "handshake", "facts": facts}:
                if found := differences(self._facts, facts):
                    _log.error("a reader does not match: %s", "; ".join(found))
                    self._stats.readers_refused += 1
                    raise PeerMismatchError("the engines do not match: " + "; ".join(found))
                return Welcome(self._facts, exports.epoch, self._memory)
            case {"op": "grant", "asked": asked}:
                return self._grant(exports, asked)
            case {"op": "revoke", "name": name, "outcome": outcome, "reason": reason}:
                exports.revoke(name, outcome, reason)
            case {"op": "closed_grants"}:
                return exports.take_closed()
        return None

    def _grant(self, exports: Exports, asked: PromptRequest) -> Grant:
        if asked.epoch != exports.epoch:
            raise PeerMismatchError("this engine was started again: shake hands first")
        size = self._config.block_size
        if len(asked.tokens) % size or not 0 <= asked.first * size <= len(asked.tokens):
            raise RequestError(f"a prompt must be whole blocks of {size} tokens", "tokens")
        if not asked.tokens or not 0 <= min(asked.tokens) <= max(asked.tokens) < (
            self._config.vocab_size
        ):
            raise RequestError(
                "there are no tokens, or such that the model does not know", "tokens"
            )
        return exports.grant(
            int32(asked.tokens), asked.first, asked.cache_salt, asked.reader, layers=asked.layers
        )

    def stats(self) -> dict[str, Any]:
        stats = self._stats
        stats.grants_open = 0 if self._exports is None else len(self._exports)
        stats.fetches_open = 0 if self._fetches is None else len(self._fetches)
        stats.slots_used = sum(slots.used for slots in self._slots)
        stats.peers_up = 0 if self._pulls is None else self._pulls.up
        return {"disagg": stats}

    def close(self, drain: Callable[[], None] | None) -> None:
        if self._exports is not None:
            self._exports.stop()
        if self._fetches is not None:
            self._fetches.stop()
        if self._listener is not None:
            self._listener.close()
        if self._pulls is not None:
            self._pulls.close()
        self._inbox.close()


def _for_readers(settings: DisaggSettings, pool: Any) -> int:
    """Counts the slots of each group for blocks that leave; the rest is for those that come."""
    if not settings.grants:
        return 0
    slots: int = pool.slots
    return slots // 2 if settings.asks else slots


def _handle(pool: Any, groups: int) -> MemoryHandle:
    """Returns what readers on this host need to map a staging pool."""
    return MemoryHandle(
        pool.handle.pid,
        pool.handle.descriptor,
        pool.handle.size,
        pool.handle.token,
        [pool.start(group, 0) for group in range(groups)],
        list(pool.sizes),
    )
