"""A simulated fleet: requests of a trace go through the router's choice to simulated engines."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from quire.features.kv_events.feature import PrefillRate
from quire.features.kv_events.messages import EVENT_HASH_BYTES, EngineLoad, KVEventLine, KVEvents
from quire.features.kv_events.prompt_report import spread
from quire.router.choice import Chooser, RouteChoice, RoutePolicy
from quire.router.prompts import PIECE_BYTES, Prompt
from quire.router.replica import ReplicaState, Role
from quire.tools.simulate.engine_model import EngineModel
from quire.tools.simulate.node import Blocks, SimulatedNode, SimulatedRequest
from quire.tools.workload import TraceRequest, WorkloadTrace

_BYTES_PER_TOKEN = 4
_REPORT_SECONDS = 0.1
"""Seconds between two reports of an engine, as in `GET /kv/events`."""
_REPORTED_BLOCKS = 64

Event = tuple[float, int, Literal["wake", "add"], int, "Flight | None"]


@dataclass(slots=True, eq=False)
class Flight:
    """A request on its way through the fleet.

    Attributes:
        asked: the request in the trace.
        prompt: the prompt as the router knows it.
        blocks: the prompt's blocks.
        choice: the replicas that the router chose.
        request: the request at the answering node.
        prefill_at: number of the prefill replica that computes the prompt at the moment.
        cached_apart: number of prompt tokens that the prefill replica had cached. None without a
            prefill replica.
        reported: whether the router has seen the head of the answer.
    """

    asked: TraceRequest
    prompt: Prompt
    blocks: Blocks
    choice: RouteChoice
    request: SimulatedRequest
    prefill_at: int | None = None
    cached_apart: int | None = None
    reported: bool = False

    @property
    def cached(self) -> int:
        """The number of prompt tokens that were cached."""
        return self.request.cached if self.cached_apart is None else self.cached_apart

    @property
    def first(self) -> float:
        """Seconds until the first token."""
        return self.request.first - self.asked.at

    @property
    def whole(self) -> float:
        """Seconds until the last token."""
        return self.request.last - self.asked.at


@dataclass(slots=True)
class SimulatedReplica:
    """A node, and the router's knowledge of it."""

    node: SimulatedNode
    state: ReplicaState
    rate: PrefillRate = field(default_factory=PrefillRate)
    flights: dict[int, Flight] = field(default_factory=dict)
    reported: float = -math.inf
    queued: float = math.inf
    """The time for which the node is in the queue of events."""


@dataclass(frozen=True, slots=True)
class FleetRun:
    """The result of a run.

    Attributes:
        flights: all requests. They have ended.
        seconds: time from the first arrival to the last token.
    """

    flights: list[Flight]
    seconds: float


class SimulatedFleet:
    """Simulated replicas of one model.

    Args:
        nodes: number of nodes.
        model: the model of each node.
        policy: the router's policy.
        block_size: tokens of a block.
        prefill: number of nodes that compute prompts for the others.
    """

    def __init__(
        self, nodes: int, model: EngineModel, policy: RoutePolicy, block_size: int, prefill: int = 0
    ) -> None:
        self._model = model
        self._size = block_size
        self._chooser = Chooser(policy)
        self._events: list[Event] = []
        self._numbers = itertools.count()
        self._replicas: list[SimulatedReplica] = []
        for number in range(nodes):
            role: Role = "both" if not prefill else "prefill" if number < prefill else "decode"
            state = ReplicaState(role)
            state.has_room(model.kv_tokens)
            if role == "decode":
                state.peers = {peer: str(peer) for peer in range(prefill)}
            self._replicas.append(SimulatedReplica(SimulatedNode(model, block_size), state))
            self._report(self._replicas[-1], 0.0)
        self._states = {n: replica.state for n, replica in enumerate(self._replicas)}
        self._ended: list[Flight] = []

    def run(self, trace: WorkloadTrace) -> FleetRun:
        """Runs a trace to its end."""
        for asked in trace.requests:
            self._run_until(asked.at)
            self._route(asked)
        self._run_until(math.inf)
        return FleetRun(self._ended, max(flight.request.last for flight in self._ended))

    # -- the router ----------------------------------------------------------------------------

    def _route(self, asked: TraceRequest) -> None:
        prompt = Prompt(_keys(asked.blocks, self._size), asked.prompt * _BYTES_PER_TOKEN)
        choice = self._chooser.choose(prompt, self._states)
        blocks = _names(asked.blocks)
        begin = asked.at + self._model.request_seconds
        request = SimulatedRequest(begin, asked.prompt, asked.output, blocks)
        flight = Flight(asked, prompt, blocks, choice, request)
        number = choice.index
        if choice.prefill:
            number = flight.prefill_at = int(choice.prefill)
            flight.request = SimulatedRequest(begin, asked.prompt, 1, blocks)
        self._push(begin, "add", number, flight)

    def _push(
        self, at: float, kind: Literal["wake", "add"], number: int, flight: Flight | None
    ) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), kind, number, flight))

    def _run_until(self, now: float) -> None:
        while self._events and self._events[0][0] <= now:
            at, _, kind, number, flight = heapq.heappop(self._events)
            replica = self._replicas[number]
            if kind == "add" and flight is not None:
                replica.flights[id(flight.request)] = flight
                self._advance(replica, at)
                begun = replica.node.step
                replica.node.add(flight.request, at)
                if replica.node.step is not begun:
                    self._launched(replica)
            elif at < replica.queued:
                continue  # An arrival has shortened the node's steps since this was queued.
            else:
                replica.queued = math.inf
                self._advance(replica, at)
            if at - replica.reported >= _REPORT_SECONDS:
                self._report(replica, at)
            if replica.node.wakes < replica.queued:
                replica.queued = replica.node.wakes
                self._push(replica.queued, "wake", number, None)

    # -- the nodes -----------------------------------------------------------------------------

    def _advance(self, replica: SimulatedReplica, now: float) -> None:
        node = replica.node
        while node.wakes <= now:
            step = node.step
            ended = node.advance(now)
            if step is not None and step.prompts:
                replica.rate.ended(step.end)
                for request, _ in step.prompts:
                    if not request.to_compute:
                        self._answered(replica.flights[id(request)])
            self._launched(replica)
            for request in ended:
                self._end(replica, replica.flights.pop(id(request)))

    def _launched(self, replica: SimulatedReplica) -> None:
        step = replica.node.step
        if step is not None and step.prompts:
            replica.rate.launched(sum(tokens for _, tokens in step.prompts), step.begin)

    def _answered(self, flight: Flight) -> None:
        """Processes the first token: the answer's head reports the prompt's blocks."""
        if flight.prefill_at is not None or flight.reported:
            return
        flight.reported = True
        flight.choice.answered()
        places = spread(len(flight.blocks), _REPORTED_BLOCKS)
        blocks = [(place * self._size, flight.blocks[place - 1]) for place in places]
        self._chooser.prefixes.learn(flight.prompt, flight.asked.prompt, blocks)
        for placement in flight.choice.placements:
            self._replicas[placement.index].state.settle(flight.prompt.keys, blocks)

    def _end(self, replica: SimulatedReplica, flight: Flight) -> None:
        if flight.prefill_at is None:
            flight.choice.end()
            self._ended.append(flight)
            return
        # The prompt is computed, and its blocks are sent to the answering node.
        flight.prefill_at = None
        reader = self._replicas[flight.choice.index]
        lacking = flight.asked.prompt - reader.node.cache.held(flight.blocks) * self._size
        model, end = self._model, flight.request.last
        at = end + model.handover_seconds + model.handover_token_seconds * max(0, lacking)
        flight.cached_apart = flight.request.cached
        reader.node.cache.add(flight.blocks)
        asked = flight.asked
        flight.request = SimulatedRequest(at, asked.prompt, asked.output, flight.blocks)
        self._push(at, "add", flight.choice.index, flight)

    def _report(self, replica: SimulatedReplica, now: float) -> None:
        """Reports a node's changes to the router."""
        node, model = replica.node, self._model
        changes = dict.fromkeys(node.cache.stored, True)
        for name in node.cache.removed:
            changes[name] = False
        stored = b"".join(n for n, kept in changes.items() if kept and node.cache.held((n,)))
        removed = b"".join(n for n in changes if not node.cache.held((n,)))
        node.cache.stored, node.cache.removed = [], []
        load = EngineLoad(
            running=len(node.generating) + len(node.prefilling),
            waiting=len(node.waiting),
            prompt_tokens=node.prompt_tokens,
            prefill_rate=replica.rate.value,
            kv_tokens=model.kv_tokens,
            handover_seconds=model.handover_seconds,
            handover_token_seconds=model.handover_token_seconds,
        )
        events = KVEvents("simulated", 0, False, self._size, load, stored, removed)
        replica.state.take_line(KVEventLine(True, True, [events]))
        replica.reported = now


@lru_cache(maxsize=1 << 18)
def _name(block: int) -> bytes:
    return hashlib.blake2b(b"%d" % block, digest_size=EVENT_HASH_BYTES).digest()


def _names(blocks: Sequence[int]) -> Blocks:
    return tuple(map(_name, blocks))


def _keys(blocks: Sequence[int], block_size: int) -> tuple[bytes, ...]:
    """Returns the keys of a prompt's pieces.

    A block id of a trace stands for all tokens up to the block's end. A piece's key does, too."""
    size = block_size * _BYTES_PER_TOKEN
    pieces = len(blocks) * size // PIECE_BYTES
    return tuple(
        _name(blocks[((place + 1) * PIECE_BYTES - 1) // size]) + b"%d" % place
        for place in range(pieces)
    )
