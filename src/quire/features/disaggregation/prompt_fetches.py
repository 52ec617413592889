"""The overhead of a prompt from a peer, without its computation, as a linear function of tokens."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire.arrays import Int32, int32
from quire.cache import BlockManager
from quire.cache.loading import LoadingPrefix, PrefixLoader
from quire.features.disaggregation.free_slots import PeerSlots
from quire.features.disaggregation.stats import DisaggStats
from quire.plan import Transfer
from quire.request import Request
from quire.scheduler import PlanBuilder

_KEPT = 0.9
"""Factor by which a new measurement reduces the weight of all earlier ones."""


class HandoverTime:
    """Fits seconds = fixed + per_token * tokens by least squares. New measurements count most.

    Neither number is negative. Both are 0 before the first measurement.
    """

    def __init__(self) -> None:
        self._count = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Adds a measurement."""
        x, y = float(tokens), max(0.0, seconds)
        self._count = self._count * _KEPT + 1.0
        self._x = self._x * _KEPT + x
        self._y = self._y * _KEPT + y
        self._xx = self._xx * _KEPT + x * x
        self._xy = self._xy * _KEPT + x * y

    @property
    def line(self) -> tuple[float, float]:
        """Returns (fixed, per_token), in seconds."""
        if not self._count:
            return 0.0, 0.0
        spread = self._count * self._xx - self._x**2
        # Measurements of one length do not determine a slope.
        if spread <= 1e-9 * self._count * self._xx:
            return self._y / self._count, 0.0
        slope = (self._count * self._xy - self._x * self._y) / spread
        slope = min(max(slope, 0.0), self._xy / self._xx if self._xx else 0.0)
        return max(0.0, (self._y - slope * self._x) / self._count), slope


# Prompts that other engines compute for this engine.

_log = logging.getLogger(__name__)

_FIRST_ID = 1 << 41
"""The first transfer id. It differs from the ids of other features."""


@dataclass(frozen=True, slots=True)
class PullOrder:
    """A prompt whose KV a thread fetches from a peer.

    Attributes:
        name: The request's name in the log.
        tokens: int32 [n]; in whole blocks for models with recurrent states.
        first: Number of leading blocks that this engine has.
        salt: The request's `cache_salt`.
        weights: Id of this engine's weights.
        peer: The only peer to ask; None: any.
        traceparent: Header of the request's trace; "": it has no trace.
    """

    name: str
    tokens: Int32
    first: int
    salt: str
    weights: str = ""
    peer: str | None = None
    traceparent: str = ""


class Pull(Protocol):
    """A thread that fetches a prompt's blocks."""

    def cancel(self) -> None:
        """Makes the thread end soon. From any thread. Idempotent."""
        ...

    def moved(self, good: bool) -> None:
        """Reports the end of a batch's copy. Does not wait. good: whether the copy succeeded."""
        ...


class Puller(Protocol):
    """Starts threads that ask peers."""

    @property
    def up(self) -> int:
        """The number of peers that may be asked now."""
        ...

    def start(self, order: PullOrder) -> Pull: ...


@dataclass(slots=True)
class BlocksArrived:
    """Blocks of a group's table that a peer has sent; see `Transfer`.

    Attributes:
        pull: The thread that received them.
        group: Their KV group.
        first: Table entry of the first block.
        slots: Their slots in the memory between engines, or in the memory of `source`.
        source: Describes the peer's memory; empty: the blocks are in the memory between engines.
        step: The peer's step that fills the blocks; -1: they are filled.
    """

    pull: Pull
    group: int
    first: int
    slots: list[int]
    source: bytes = b""
    step: int = -1


@dataclass(slots=True)
class PullEnded:
    """The end of a thread, which no longer uses any slot.

    Attributes:
        outcome: See `OUTCOMES`.
        reason: Why the fetch failed, for the log.
        seconds: Time of a fetched prompt, without the time to compute it.
        asked: Seconds until the peer had agreed.
    """

    pull: Pull
    outcome: str
    reason: str = ""
    seconds: float = 0.0
    asked: float = 0.0


@dataclass(slots=True, eq=False)
class Fetch:
    """A prompt whose blocks are being fetched.

    Attributes:
        filled: by group, the table entries whose blocks have arrived.
        outcome: outcome of the thread; None until it has ended.
        dropped: whether the blocks are not wanted, because the request has ended or the peer sent
            wrong blocks.
    """

    request_id: str
    loading: LoadingPrefix
    pull: Pull
    filled: list[set[int]]
    moving: dict[int, BlocksArrived] = field(default_factory=dict)
    waiting: list[BlocksArrived] = field(default_factory=list)
    outcome: str = ""
    dropped: bool = False

    @property
    def complete(self) -> bool:
        """Whether every block has arrived."""
        wanted = zip(self.loading.places, self.loading.blocks, self.filled, strict=True)
        return all(len(blocks) == len(filled) for _, blocks, filled in wanted)

    def wants(self, arrived: BlocksArrived) -> bool:
        """Whether this fetch has asked for the blocks. A block may arrive twice, if the peer lost
        it while this engine read it."""
        if not 0 <= arrived.group < len(self.filled):
            return False
        place = self.loading.places[arrived.group]
        end = place + len(self.loading.blocks[arrived.group])
        return place <= arrived.first and arrived.first + len(arrived.slots) <= end


class Fetches:
    """All fetches of an engine. Belongs to the engine's loop.

    Args:
        sizes: bytes of a block, by group.
        least: fewest missing tokens for which to ask a peer.
    """

    def __init__(
        self,
        puller: Puller,
        slots: PeerSlots,
        sizes: Sequence[int],
        stats: DisaggStats,
        *,
        least: int,
    ) -> None:
        self._puller = puller
        self._slots = slots
        self._sizes = sizes
        self._stats = stats
        self._least = least
        self._ids = itertools.count(_FIRST_ID)
        self._by_pull: dict[Pull, Fetch] = {}
        self._by_request: dict[str, Fetch | None] = {}
        """Maps ids of decided requests to their fetches; None: no peer computes the prompt."""
        self._chosen: dict[str, tuple[str | None, str]] = {}
        """Maps request ids to the chosen peer and the traceparent; see `choose`."""
        self.handover = HandoverTime()

    def attach(self, blocks: BlockManager, wake: Callable[[str], None]) -> None:
        self._blocks = blocks
        self._loader = PrefixLoader(blocks)
        self._wake = wake

    def __len__(self) -> int:
        return len(self._by_pull)

    # -- requests ------------------------------------------------------------------------------

    def choose(self, request: str, peer: str | None, traceparent: str) -> None:
        """Chooses the peer that computes a request's prompt, however short the prompt is.

        Args:
            request: the request's id.
            peer: the peer's address; "": no peer; None: the engine decides.
            traceparent: context of the request's trace; "" without a trace.
        """
        self._chosen[request] = peer, traceparent

    def fetch(self, request: Request, tokens: Int32, limit: int) -> bool:
        """Decides, once for each request, whether a peer computes its prompt."""
        name = request.request_id
        if name in self._by_request:
            return self._by_request[name] is not None
        size = self._blocks.block_size
        length = limit if self._loader.tails else limit // size * size
        peer, traceparent = self._chosen.get(name.rpartition("/")[0], (None, ""))
        least = self._least if peer is None else size
        if length < least or peer == "" or request.lora_id or request.num_preemptions:
            return False
        if request.prompt is not None:
            return False  # Tokens alone do not tell a peer what the prompt stands for.
        cached = self._blocks.match(request.namespace, tokens, length).length
        if length - cached < least or not self._puller.up:
            return False
        match = self._blocks.match(request.namespace, tokens, length, whole_only=True)
        prefix = tokens[:length].copy()
        loading = self._loader.begin(request.namespace, match, prefix, request.known)
        if loading is None:
            return False  # The request has no room to start either, so this is called again.
        salt, weights = request.cache_salt, request.weights
        order = PullOrder(name, prefix, match.whole, salt, weights, peer, traceparent)
        fetch = Fetch(name, loading, self._puller.start(order), [set() for _ in loading.blocks])
        self._by_pull[fetch.pull] = fetch
        self._by_request[name] = fetch
        return True

    def finish(self, request: Request) -> None:
        """Cancels the fetch of a request that has ended."""
        self._chosen.pop(request.request_id.rpartition("/")[0], None)
        fetch = self._by_request.pop(request.request_id, None)
        if fetch is not None:
            self._drop(fetch)

    def forget(self) -> None:
        """Cancels all fetches, because the prefix cache is being cleared, or the weights change."""
        for fetch in list(self._by_pull.values()):
            self._drop(fetch)

    def _drop(self, fetch: Fetch) -> None:
        fetch.dropped = True
        fetch.pull.cancel()
        self._give_waiting(fetch)
        self._end(fetch)

    def _give_waiting(self, fetch: Fetch) -> None:
        for arrived in fetch.waiting:
            self._slots.give(arrived.group, arrived.slots)
        fetch.waiting = []

    # -- news ----------------------------------------------------------------------------------

    def handle(self, event: BlocksArrived | PullEnded) -> None:
        """Handles an event from a thread."""
        fetch = self._by_pull[event.pull]
        match event:
            case BlocksArrived() if fetch.dropped:
                self._slots.give(event.group, event.slots)
            case BlocksArrived() if fetch.wants(event):
                fetch.filled[event.group].update(range(event.first, event.first + len(event.slots)))
                fetch.waiting.append(event)
            case BlocksArrived():
                _log.error("%s: a peer sent blocks that were not asked for", fetch.request_id)
                self._slots.give(event.group, event.slots)
                self._drop(fetch)
            case PullEnded():
                fetch.outcome = event.outcome
                if event.outcome == "done":
                    missing = len(fetch.loading.tokens) - fetch.loading.start
                    self.handover.add(missing, event.seconds)
                    self._stats.handover_seconds += max(0.0, event.seconds)
                    self._stats.ask_seconds += event.asked
                if event.outcome == "done" and not fetch.complete and not fetch.dropped:
                    fetch.outcome = "broken"
                self._stats.fetches[fetch.outcome] = self._stats.fetches.get(fetch.outcome, 0) + 1
                if fetch.outcome not in ("done", "aborted"):
                    _log.warning(
                        "%s computes its prompt itself (%s): %s",
                        fetch.request_id,
                        fetch.outcome,
                        event.reason,
                    )
                if fetch.outcome != "done":
                    self._give_waiting(fetch)
                    self._wake_request(fetch, good=False)
                self._end(fetch)

    # -- steps ---------------------------------------------------------------------------------

    def pending(self) -> bool:
        """Whether the scheduler must make a plan, because blocks have come or are being copied."""
        return any(fetch.waiting or fetch.moving for fetch in self._by_pull.values())

    def plan(self, builder: PlanBuilder) -> None:
        """Copies the blocks that have come to the booked blocks."""
        for fetch in self._by_pull.values():
            for arrived in fetch.waiting:
                at = arrived.first - fetch.loading.places[arrived.group]
                blocks = fetch.loading.blocks[arrived.group][at : at + len(arrived.slots)]
                id = next(self._ids)
                fetch.moving[id] = arrived
                move = Transfer(id, "in", "peer", arrived.group, int32(blocks))
                move.slots = int32(arrived.slots)
                move.source, move.step = arrived.source, arrived.step
                builder.transfer(move)
            fetch.waiting = []

    def transferred(self, finished: Sequence[int], failed: Sequence[int]) -> None:
        """Handles copies that have ended."""
        for fetch in list(self._by_pull.values()):
            for id in [id for id in (*finished, *failed) if id in fetch.moving]:
                arrived = fetch.moving.pop(id)
                self._slots.give(arrived.group, arrived.slots)
                self._stats.blocks_received += len(arrived.slots)
                size = self._sizes[arrived.group]
                self._stats.bytes_received += len(arrived.slots) * size
                if id in failed:
                    fetch.dropped = True
                fetch.pull.moved(id not in failed)
            self._end(fetch)

    def _end(self, fetch: Fetch) -> None:
        """Ends a fetch without running copies. Its blocks enter the prefix tree, or are freed."""
        if not fetch.outcome or fetch.moving or fetch.waiting or fetch.pull not in self._by_pull:
            return
        del self._by_pull[fetch.pull]
        good = fetch.outcome == "done" and not fetch.dropped
        self._loader.end(fetch.loading, good)
        if good:
            self._stats.remote_tokens += len(fetch.loading.tokens) - fetch.loading.start
        self._wake_request(fetch, good)

    def _wake_request(self, fetch: Fetch, good: bool) -> None:
        """Wakes a request if it still waits for the fetch."""
        if self._by_request.get(fetch.request_id) is fetch:
            self._by_request[fetch.request_id] = None
            self._stats.local += not good
            self._wake(fetch.request_id)

    def stop(self) -> None:
        """Ends all threads."""
        for fetch in self._by_pull.values():
            fetch.pull.cancel()
