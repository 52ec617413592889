"""Disaggregated prefill and decode: the parts in the engine's loop and in the scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from quire.arrays import Int32, int32
from quire.cache import BlockManager
from quire.config import EngineConfig
from quire.errors import (
    ConfigError,
    OverloadedError,
    PeerMismatchError,
    QuireError,
    RequestError,
)
from quire.executor import Capacity, Executor
from quire.features.call import Begun, CallType, RequestField, shown_text
from quire.features.disaggregation.calls import (
    GRANT,
    HANDSHAKE,
    PEER,
    SET_PEERS,
    GrantRequest,
    PeerChoice,
)
from quire.features.disaggregation.exports import Exports
from quire.features.disaggregation.facts import KVFacts, differences, facts_of
from quire.features.disaggregation.free_slots import BlocksInPlace, FreeSlots, PeerSlots
from quire.features.disaggregation.hook import POOL
from quire.features.disaggregation.layer_clock import LAYER_CLOCK
from quire.features.disaggregation.listener import Listener
from quire.features.disaggregation.log_limit import LogLimit
from quire.features.disaggregation.messages import (
    ClosedGrant,
    Grant,
    MemoryHandle,
    PromptRequest,
    Welcome,
)
from quire.features.disaggregation.peer_list import PeerList
from quire.features.disaggregation.prompt_fetches import BlocksArrived, Fetches, PullEnded
from quire.features.disaggregation.pulls import PullThreads
from quire.features.disaggregation.reader_link import Inbox, LinkClosed, ReaderLink, ReaderMessage
from quire.features.disaggregation.settings import (
    DisaggSettings,
    check_engine,
    model_groups,
    read_settings,
)
from quire.features.disaggregation.stats import DisaggStats
from quire.features.loop_feature import EngineInterface, Failure, LoopFeature
from quire.request import Request
from quire.runner.transfer.engine_memory import decode_memory, encode_memory
from quire.sampling_params import SamplingParams
from quire.scheduler import Feature, PlanBuilder

_log = logging.getLogger(__name__)
_log.addFilter(LogLimit())

_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)
"""Parameters of a request that only computes a prompt for a reader."""


class DisaggFeature(Feature):
    """Passes the scheduler's calls on to `Exports` (prompts for others) and `Fetches` (prompts from
    others)."""

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

    def weights_changed(self) -> None:
        for part in (self._exports, self._fetches):
            if part is not None:
                part.forget()


class DisaggLoop(LoopFeature):
    """Opens the exports and fetches that the settings ask for, and answers peers' calls."""

    def __init__(self, config: EngineConfig) -> None:
        if config.args.kv_peers is None:
            raise ConfigError("kv_peers: the settings are missing", "kv_peers")
        self._config = config
        self._settings = read_settings(config.args.kv_peers)
        check_engine(config)
        self._inbox: Inbox[ReaderMessage | LinkClosed | BlocksArrived | PullEnded] = Inbox()
        self._stats = DisaggStats()
        self._exports: Exports | None = None
        self._fetches: Fetches | None = None
        self._listener: Listener | None = None
        self._pulls: PullThreads | None = None
        self._slots: list[FreeSlots] = []
        self._ends: dict[str, Future[ClosedGrant]] = {}
        """Maps names of open grants to the futures of their ends."""

    def start(self, executor: Executor, capacity: Capacity) -> DisaggFeature:
        """Listens for readers, and prepares to ask peers.

        Raises:
            ConfigError: The address is not available, or a peer's URL is invalid.
        """
        settings = self._settings
        pool = executor.call(POOL, None)
        staged = settings.transport == "tcp"
        own = model_groups(self._config, capacity.groups)
        self._facts = facts_of(self._config, capacity.groups, pool.sizes, settings.transport, own)
        self._memory: bytes = b"" if staged else pool.memory
        if settings.layers:
            clock = executor.call(LAYER_CLOCK, None)
            self._memory = encode_memory(decode_memory(pool.memory).ranks, clock)
        if settings.grants:
            self._exports = self._open_exports(pool, staged, len(capacity.groups), own)
        if settings.asks:
            self._fetches = self._open_fetches(pool, staged, capacity)
        return DisaggFeature(self._exports, self._fetches)

    @property
    def _own_exports(self) -> Exports:
        if self._exports is None:
            raise QuireError("this engine computes no prompts for others")
        return self._exports

    @property
    def _own_fetches(self) -> Fetches:
        if self._fetches is None:
            raise QuireError("this engine asks no other engine for prompts")
        return self._fetches

    @property
    def _own_pulls(self) -> PullThreads:
        if self._pulls is None:
            raise QuireError("this engine asks no other engine for prompts")
        return self._pulls

    def _open_exports(self, pool: Any, staged: bool, groups: int, own: int) -> Exports:
        """Listens for readers.

        Args:
            staged: whether blocks go through the pool between engines.
            groups: number of KV groups.
            own: number of the model's own KV groups.
        """
        settings = self._settings
        self._listener = Listener(
            settings.host,
            settings.port,
            pool.view if staged else None,
            self._inbox.put,
            self._inbox.wake,
            self._greet,
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
        """Prepares to ask peers. staged: whether blocks come through the pool between engines."""
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
            if isinstance(event, ReaderMessage | LinkClosed):
                if self._exports is not None:
                    self._exports.handle(event)
            elif self._fetches is not None:
                self._fetches.handle(event)
        if self._exports is None:
            return (), ()
        failed = self._exports.check()
        if self._ends:
            self._end_grants(self._exports)
        return (), failed

    def fds(self) -> Sequence[int]:
        return (self._inbox.fd,)

    def _greet(self, link: ReaderLink, grant: Grant) -> None:
        """Greets a reader from a connection's thread."""
        if self._exports is not None:
            self._exports.greet(link, grant)

    # -- calls ---------------------------------------------------------------------------------

    def calls(self) -> Mapping[CallType[Any, Any], Callable[[EngineInterface, Any], Any]]:
        found: dict[CallType[Any, Any], Callable[[EngineInterface, Any], Any]] = {}
        if self._exports is not None:
            found |= {HANDSHAKE: self._shake_hands, GRANT: self._grant}
        if self._pulls is not None:
            found[SET_PEERS] = self._set_peers
        return found

    def fields(self) -> Mapping[RequestField[Any], Callable[[str, Any], None]]:
        return {} if self._pulls is None else {PEER: self._choose_peer}

    def load(self) -> Mapping[str, float]:
        if self._fetches is None:
            return {}
        fixed, per_token = self._fetches.handover.line
        return {"handover_seconds": fixed, "handover_token_seconds": per_token}

    def _set_peers(self, engine: EngineInterface, urls: list[str]) -> list[str]:
        peers = self._own_pulls.peers
        try:
            peers.replace(urls)
        except ConfigError as error:
            raise RequestError(str(error), "peers") from None
        _log.info("prompts are asked for at %s", ", ".join(peers.urls) or "no server")
        return list(peers.urls)

    def _choose_peer(self, request: str, choice: PeerChoice) -> None:
        if choice.peer and choice.peer not in self._own_pulls.peers.urls:
            raise RequestError(f"{choice.peer} is no peer of this server", "prefill", "no_peer")
        self._own_fetches.choose(request, choice.peer, choice.traceparent)

    def _shake_hands(self, engine: EngineInterface, facts: KVFacts) -> Welcome:
        if found := differences(self._facts, facts):
            _log.error("a reader does not match: %s", "; ".join(found))
            self._stats.readers_refused += 1
            raise PeerMismatchError("the engines do not match: " + "; ".join(found))
        return Welcome(self._facts, self._own_exports.epoch, self._memory)

    def _grant(self, engine: EngineInterface, request: GrantRequest) -> Begun:
        """Adds a request that computes a prompt. The reader takes its blocks, not its tokens."""
        asked, exports = request.asked, self._own_exports
        self._check_prompt(asked)
        if asked.weights != engine.scheduler.weights:
            raise PeerMismatchError(
                f"the reader's weights are of the update {asked.weights or 'none'!r}, this "
                f"engine's of {engine.scheduler.weights or 'none'!r}: update both with one id"
            )
        tokens = int32(asked.tokens)
        grant = exports.grant(
            tokens, asked.first, asked.cache_salt, asked.reader, layers=asked.layers
        )
        try:
            engine.add(
                grant.name,
                tokens,
                _ONE_TOKEN,
                max_total=len(tokens) + 1,
                cache_salt=asked.cache_salt,
                tenant=request.tenant,
                share=request.share,
            )
        except Exception as error:
            outcome = "overloaded" if isinstance(error, OverloadedError) else "refused"
            exports.revoke(grant.name, outcome, shown_text(error))
            raise
        end = self._ends[grant.name] = Future()
        return Begun(grant, end)

    def _check_prompt(self, asked: PromptRequest) -> None:
        if asked.epoch != self._own_exports.epoch:
            raise PeerMismatchError("this engine was started again: shake hands first")
        size = self._config.block_size
        if len(asked.tokens) % size and not self._own_exports.tails:
            raise RequestError(
                f"the model has recurrent states: a prompt must be whole blocks of {size} tokens",
                "tokens",
            )
        if not 0 <= asked.first * size <= len(asked.tokens):
            raise RequestError(
                f"first: {asked.first} blocks of {size} tokens are more than the prompt has",
                "first",
            )
        if not asked.tokens or not 0 <= min(asked.tokens) <= max(asked.tokens) < (
            self._config.vocab_size
        ):
            raise RequestError(
                "there are no tokens, or some are outside the model's vocabulary", "tokens"
            )

    def _end_grants(self, exports: Exports) -> None:
        """Resolves the futures of grants that have ended."""
        for closed in exports.take_closed():
            end = self._ends.pop(closed.name, None)
            if end is not None:
                end.set_result(closed)

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
    """Returns the number of each group's slots for sent blocks. The others are for received
    blocks."""
    if not settings.grants:
        return 0
    slots: int = pool.slots
    return slots // 2 if settings.asks else slots


def _handle(pool: Any, groups: int) -> MemoryHandle:
    """Returns the handle with which readers on this host map a staging pool."""
    return MemoryHandle(
        pool.handle.pid,
        pool.handle.descriptor,
        pool.handle.size,
        pool.handle.token,
        [pool.start(group, 0) for group in range(groups)],
        list(pool.sizes),
    )
