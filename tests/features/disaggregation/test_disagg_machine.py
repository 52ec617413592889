"""Two schedulers: the writer computes prompts for the reader, over a connection that may break at
any message. Requests are aborted, readers stall, and engines die. Each request still ends with the
tokens it would get alone. The fake executors check every block they read, and no resource stays in
use."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from quire.arrays import int32
from quire.config import SchedulerConfig
from quire.errors import RequestError
from quire.features.disaggregation.exports import Exports
from quire.features.disaggregation.free_slots import BlocksInPlace, FreeSlots
from quire.features.disaggregation.loop import DisaggFeature
from quire.features.disaggregation.messages import (
    BatchAck,
    BlockBatch,
    End,
    Grant,
    GrantAccepted,
    GrantRefused,
    MemoryHandle,
    Message,
    OpenGrant,
)
from quire.features.disaggregation.prompt_fetches import (
    BlocksArrived,
    Fetches,
    PullEnded,
    PullOrder,
)
from quire.features.disaggregation.reader_link import LinkClosed, ReaderMessage
from quire.features.disaggregation.stats import DisaggStats
from quire.plan import KVGroup, StepResult, Transfer
from quire.request import FinishReason, Request
from quire.sampling_params import SamplingParams
from quire.scheduler import Scheduler
from tests.fakes import FakeExecutor, expected_output
from tests.slow import examples

SIZE = 4
LEASE = 10.0
SLOTS = 5
VOCAB = 40
WAYS = ("sync", "async", "direct", "direct async", "direct layers", "direct unseen layers")
MEMORY = MemoryHandle(0, 0, 0, b"", [], [])
GROUPS = {
    "full": (KVGroup((0,), tokens_per_block=SIZE),),
    "window": (
        KVGroup((0,), tokens_per_block=SIZE),
        KVGroup((1,), "window", tokens_per_block=SIZE, window=7),
    ),
    "state": (KVGroup((0,), tokens_per_block=SIZE), KVGroup((1,), "state", tokens_per_block=SIZE)),
    "drafts": (KVGroup((0,), tokens_per_block=SIZE), KVGroup((1,), tokens_per_block=SIZE)),
}


@dataclass(eq=False)
class Wire:
    """A connection, as the writing engine's loop sees it."""

    engine: Engine
    out: deque[Message | None] = field(default_factory=deque)
    stopped: bool = False
    taken: set[int] = field(default_factory=set)
    promise: tuple[set[int], End] | None = None

    def send(self, message: Message) -> None:
        self.out.append(message)

    def end_after(self, numbers: Collection[int], end: End) -> None:
        self.promise = set(numbers), end
        self.end_if_taken()

    def end_if_taken(self) -> None:
        if self.promise is not None and self.promise[0] <= self.taken:
            self.out.append(self.promise[1])
            self.promise = None

    def close(self) -> None:
        self.promise = None
        self.out.append(None)

    def hear(self, message: Message) -> None:
        """The reader's message arrives; the loop handles it in its next iteration."""
        if isinstance(message, OpenGrant) and self.engine.exports is not None:
            self.engine.exports.greet(self, message.grant)
        if isinstance(message, BatchAck):
            self.taken.add(message.number)
            self.end_if_taken()
        self.engine.news.append(ReaderMessage(self, message))

    def stop(self) -> None:
        """The connection has ended for the writer."""
        if not self.stopped:
            self.stopped = True
            self.engine.news.append(LinkClosed(self))


@dataclass(eq=False)
class FakePull:
    """A reader's thread, one message at a time."""

    order: PullOrder
    cancelled: bool = False
    grant: Grant | None = None
    wire: Wire | None = None
    reads: BlockBatch | None = None
    ends: deque[bool] = field(default_factory=deque)

    def cancel(self) -> None:
        self.cancelled = True

    def moved(self, good: bool) -> None:
        self.ends.append(good)


class FakePuller:
    up = 1

    def __init__(self) -> None:
        self.pulls: list[FakePull] = []

    def start(self, order: PullOrder) -> FakePull:
        self.pulls.append(FakePull(order))
        return self.pulls[-1]


class ReadingExecutor(FakeExecutor):
    """An executor that reads other executors' blocks, with their contents at the end of the
    read."""

    def __init__(self, *given: Any, others: dict[bytes, Engine], **options: Any) -> None:
        super().__init__(*given, **options)
        self.others = others
        self.stuck = False
        """The peer neither answers nor is gone."""
        self.ran = -1
        """The last step whose body has run."""

    def collect(self) -> StepResult:
        self.ran = self._queue[0].step_id
        return super().collect()

    def _source(self, transfer: Transfer) -> list[Any]:
        if transfer.direction == "out":
            return super()._source(transfer)
        return [None] * len(transfer.slots)

    def _arrive(self) -> tuple[list[int], list[int]]:
        for move in self._moving:
            source = self.others.get(move.transfer.source)
            if move.transfer.direction != "in" or source is None:
                continue
            if self.stuck or source.executor.ran < move.transfer.step:
                move.due = max(move.due, self.steps + 1)
            else:
                blocks = source.executor._blocks(move.transfer.group)
                move.data = [blocks[block].copy() for block in move.transfer.slots]
        return super()._arrive()

    def _check_still(self, move: Any) -> None:
        """Checks nothing: blocks may change during a read, and then are not used."""


class Engine:
    """A scheduler and its body; a writer or a reader. others: by name, the bodies that it reads;
    None: blocks go through memory between engines."""

    def __init__(
        self,
        kind: str,
        now: list[float],
        seed: int,
        *,
        writes: bool,
        chunks: bool,
        layers: bool = False,
        others: dict[bytes, Engine] | None = None,
    ) -> None:
        groups = GROUPS[kind]
        # Few blocks, so that freed blocks are soon reused.
        counts = [24, 24][: len(groups)] if writes else [60, 40][: len(groups)]
        self.name = str(seed).encode()
        self.executor: Any = FakeExecutor(groups, counts, vocab=VOCAB, seed=seed)
        self.slots: FreeSlots | BlocksInPlace = FreeSlots(len(groups), 0, SLOTS)
        if others is not None:
            self.executor = ReadingExecutor(groups, counts, vocab=VOCAB, seed=seed, others=others)
            self.slots = BlocksInPlace()
        self.stats = DisaggStats()
        self.puller = FakePuller()
        self.exports: Exports | None = None
        self.fetches: Fetches | None = None
        self.news: list[ReaderMessage | LinkClosed] = []
        sizes = [1] * len(groups)
        if writes:
            self.exports = Exports(
                self.slots,
                sizes,
                self.stats,
                lease=LEASE,
                port=0,
                chunks=chunks,
                layers=layers,
                memory=MEMORY if others is None else None,
                model_groups=1 if kind == "drafts" else None,
                clock=lambda: now[0],
            )
        else:
            self.fetches = Fetches(self.puller, self.slots, sizes, self.stats, least=SIZE)
        config = SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=9, max_model_len=64, steps_in_flight=2
        )
        feature = DisaggFeature(self.exports, self.fetches)
        self.scheduler = Scheduler(config, self.executor.capacity, [feature])
        self.depth = config.steps_in_flight

    def add(self, name: str, tokens: list[int], max_tokens: int, seed: int = 0) -> Request:
        params = SamplingParams(max_tokens=max_tokens)
        total = len(tokens) + max_tokens
        request = Request(name, int32(tokens), params, max_total=total, arrival=0.0, seed=seed)
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        if self.exports is not None:
            for event in self.news:
                self.exports.handle(event)
            self.news = []
            for request, _ in self.exports.check():
                self.scheduler.abort(request.request_id, FinishReason.ERROR)
        while self.scheduler.num_in_flight < self.depth:
            plan = self.scheduler.plan()
            if plan is None:
                break
            self.executor.submit(plan)
        if self.scheduler.num_in_flight:
            self.scheduler.update(self.executor.collect())

    def check_empty(self) -> None:
        """Checks that no transfer holds a resource."""
        groups = range(len(self.scheduler.blocks.groups))
        if isinstance(self.slots, FreeSlots):
            assert [self.slots.num_free(g) for g in groups] == [SLOTS for _ in groups]
        assert not self.scheduler.blocks.loading
        assert [usage.used for usage in self.scheduler.blocks.usage()] == [0 for _ in groups]
        assert not self.exports
        assert not self.fetches


class DisaggMachine(RuleBasedStateMachine):
    @initialize(
        kind=st.sampled_from(sorted(GROUPS)),
        way=st.sampled_from(WAYS),
        seed=st.integers(0, 99),
    )
    def begin(self, kind: str, way: str, seed: int) -> None:
        """Starts both engines.

        Args:
            kind: key of `GROUPS`.
            way: how blocks reach the reader, from `WAYS`. "direct": from the writer's memory, not
                over a connection. "async": after each step, not after the whole prompt. "layers":
                after each layer.
            seed: of the random choices.
        """
        self.now = [0.0]
        self.kind, self.layers = kind, way.endswith("layers")
        self.seen = self.layers and "unseen" not in way
        self.chunks = self.layers or way.endswith("async")
        self.writers: dict[bytes, Engine] | None = {} if way.startswith("direct") else None
        self.random = random.Random(seed)
        self.names = 0
        self.alive: list[Request] = []
        self.fetched = 0
        self.start_writer()
        self.start_reader()

    def start_writer(self) -> None:
        self.names += 1
        self.writer = Engine(
            self.kind,
            self.now,
            self.names,
            writes=True,
            chunks=self.chunks,
            layers=self.layers,
            others=self.writers,
        )
        if self.writers is not None:
            self.writers.clear()
            self.writers[self.writer.name] = self.writer

    def start_reader(self) -> None:
        self.names += 1
        self.reader = Engine(
            self.kind, self.now, self.names, writes=False, chunks=False, others=self.writers
        )

    # -- what users and time do ----------------------------------------------------------------

    @rule(stem=st.integers(0, 2), length=st.integers(2, 40), more=st.integers(1, 6))
    def ask(self, stem: int, length: int, more: int) -> None:
        if len(self.alive) >= 8:
            return
        draw = random.Random(stem)
        tokens = [draw.randrange(VOCAB) for _ in range(length)]
        self.names += 1
        self.alive.append(self.reader.add(f"{self.names}/0", tokens, more, self.names))

    @rule(which=st.integers(0, 7))
    def abort(self, which: int) -> None:
        if which < len(self.alive):
            self.reader.scheduler.abort(self.alive.pop(which).request_id)

    @rule(seconds=st.sampled_from([1.0, LEASE / 2, LEASE + 1]))
    def wait(self, seconds: float) -> None:
        self.now[0] += seconds

    @rule(stuck=st.booleans())
    def stick(self, stuck: bool) -> None:
        """Makes reads of the writer's memory stall, or end again."""
        if isinstance(self.reader.executor, ReadingExecutor):
            self.reader.executor.stuck = stuck

    @rule()
    def forget(self) -> None:
        self.reader.scheduler.reset_prefix_cache()
        self.writer.scheduler.reset_prefix_cache()

    @rule()
    def preempt_writer(self) -> None:
        """Preempts the writer's latest request, so that others take its blocks."""
        running = self.writer.scheduler._running.entries
        if running and running[-1][-1].num_preemptions < 3:
            self.writer.scheduler._preempt(running[-1][-1])
            self.writer.scheduler.reset_prefix_cache()

    @rule(count=st.integers(1, 4))
    def run_writer(self, count: int) -> None:
        for _ in range(count):
            self.writer.step()

    @rule(count=st.integers(1, 4))
    def run_reader(self, count: int) -> None:
        for _ in range(count):
            self.reader.step()
        for request in self.alive:
            if request.finished:
                assert request.finish_reason is FinishReason.LENGTH
                assert request.output.tolist() == expected_output(request, VOCAB, None)
        self.alive = [request for request in self.alive if not request.finished]

    # -- what happens on the wire --------------------------------------------------------------

    @rule(which=st.integers(0, 3), count=st.integers(1, 5))
    def talk(self, which: int, count: int) -> None:
        pulls = self.reader.puller.pulls
        for _ in range(count):
            if which < len(pulls):
                self.advance(pulls[which])

    def advance(self, pull: FakePull) -> None:
        """Takes the next action of a reader's thread."""
        if pull.cancelled:
            self.finish(pull, "aborted")
        elif pull.grant is None:
            self.request_grant(pull)
        elif pull.wire is None:
            pull.wire = Wire(self.writer)
            pull.wire.hear(OpenGrant(pull.grant))
        elif pull.reads is not None:
            self.end_read(pull, pull.wire, pull.reads)
        elif pull.wire.out:
            self.read(pull, pull.wire)

    def end_read(self, pull: FakePull, wire: Wire, batch: BlockBatch) -> None:
        """Continues once the reading engine has read a batch from the writer's cache."""
        if not pull.ends:
            return
        pull.reads = None
        if pull.ends.popleft():
            wire.hear(BatchAck(batch.number))
        else:
            self.finish(pull, "dead")

    def request_grant(self, pull: FakePull) -> None:
        exports = self.writer.exports
        assert exports is not None
        order = pull.order
        wanted = order.tokens, order.first, order.salt, "reader"
        grant = exports.grant(*wanted, layers=self.seen)
        try:
            self.writer.add(f"{grant.name}/0", order.tokens.tolist(), 1)
        except RequestError as error:
            exports.revoke(grant.name, "refused", str(error))
            self.finish(pull, "refused")
        else:
            pull.grant = grant

    def read(self, pull: FakePull, wire: Wire) -> None:
        message = wire.out.popleft()
        match message:
            case BlockBatch() if isinstance(self.reader.slots, BlocksInPlace):
                assert message.slots is not None
                name, pull.reads = wire.engine.name, message
                brought = message.group, message.first, message.slots, name, message.step
                self.tell(BlocksArrived(pull, *brought))
            case BlockBatch():
                assert isinstance(self.reader.slots, FreeSlots)
                slots = self.reader.slots.await_many(message.group, message.count, 0.0)
                if not slots:
                    wire.out.appendleft(message)
                    return
                sources = message.slots or []
                assert len(sources) == len(slots)
                for source, target in zip(sources, slots, strict=True):
                    data = wire.engine.executor.host["peer", message.group, source]
                    self.reader.executor.host["peer", message.group, target] = data.copy()
                self.tell(BlocksArrived(pull, message.group, message.first, slots))
                wire.hear(BatchAck(message.number))
            case End():
                self.fetched += 1
                self.finish(pull, "done")
            case GrantRefused():
                self.finish(pull, "refused")
            case None:
                self.finish(pull, "dead")
            case _:
                pass

    def tell(self, event: BlocksArrived | PullEnded) -> None:
        assert self.reader.fetches is not None
        self.reader.fetches.handle(event)

    def finish(self, pull: FakePull, outcome: str) -> None:
        self.reader.puller.pulls.remove(pull)
        self.tell(PullEnded(pull, outcome))
        if pull.wire is not None:
            pull.wire.stop()

    @rule(which=st.integers(0, 3))
    def cut(self, which: int) -> None:
        pulls = self.reader.puller.pulls
        if which < len(pulls):
            self.finish(pulls[which], "dead")

    @rule()
    def kill_writer(self) -> None:
        for pull in list(self.reader.puller.pulls):
            if pull.grant is not None:
                pull.wire = None
                self.finish(pull, "dead")
        self.start_writer()

    @rule()
    def kill_reader(self) -> None:
        for pull in self.reader.puller.pulls:
            if pull.wire is not None:
                pull.wire.stop()
        self.alive = []
        self.start_reader()

    # -- the end -------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "now"):
            return
        self.stick(False)
        for _ in range(3000):
            self.run_reader(1)
            self.run_writer(1)
            for pull in list(self.reader.puller.pulls):
                self.advance(pull)
            if not self.alive and not self.reader.puller.pulls:
                break
        assert not self.alive
        self.now[0] += 2 * LEASE  # grants that no reader used
        for engine in (self.writer, self.reader):
            for _ in range(200):
                engine.step()
            engine.check_empty()


TestDisagg = DisaggMachine.TestCase
TestDisagg.settings = settings(max_examples=examples(60), stateful_step_count=40)


def test_blocks_that_a_step_is_yet_to_fill_are_not_sent() -> None:
    """Prompts that arrive together share blocks which the first step of both computes."""
    machine = DisaggMachine()
    machine.begin("window", "async", 0)
    for stem, length in ((0, 4), (0, 17), (1, 5), (1, 9)):
        machine.ask(stem, length, 1)
    machine.teardown()
    assert machine.fetched == 3


def test_prompts_are_read_from_the_peer_without_faults() -> None:
    """Checks without random faults that prompts come from the other engine."""
    for kind in GROUPS:
        for way in WAYS:
            machine = DisaggMachine()
            machine.begin(kind, way, 0)
            for stem, length in enumerate((40, 21, 33)):
                machine.ask(stem, length, 6)
            machine.teardown()
            assert machine.fetched == 3
            stats = machine.reader.stats
            assert (stats.local, stats.fetches) == (0, {"done": 3})
            assert machine.writer.stats.grants == {"done": 3}
            # The last token is computed here. States are only known at the ends of blocks.
            assert stats.remote_tokens == (36 if kind == "state" else 39) + 20 + 32
            hits = machine.reader.scheduler.stats().prefix_hit_tokens
            assert hits == stats.remote_tokens


def test_a_request_does_not_wait_for_a_read_that_does_not_end() -> None:
    machine = DisaggMachine()
    machine.begin("full", "direct", 0)
    machine.stick(True)
    machine.ask(0, 40, 6)
    (request,) = machine.alive
    for _ in range(40):
        machine.talk(0, 1)
        machine.run_writer(1)
        machine.run_reader(1)
    assert not request.finished
    assert machine.reader.scheduler.blocks.loading
    machine.cut(0)
    for _ in range(40):
        machine.run_reader(1)
    assert request.finished
    # Blocks that the read may still write stay reserved until it ends.
    assert machine.reader.scheduler.blocks.loading
    machine.teardown()
    assert machine.reader.stats.local == 1


def test_blocks_read_after_their_lease_are_not_used() -> None:
    """When the read ends, other prompts have long reused the writer's blocks."""
    machine = DisaggMachine()
    machine.begin("full", "direct", 0)
    machine.stick(True)
    machine.ask(0, 40, 6)
    for _ in range(40):
        machine.talk(0, 1)
        machine.run_writer(1)
        machine.run_reader(1)
    machine.wait(LEASE + 1)
    draw = random.Random(1)
    for i in range(4):
        machine.writer.add(f"other{i}/0", [draw.randrange(VOCAB) for _ in range(40)], 2)
        machine.run_writer(20)
    machine.teardown()
    assert machine.fetched == 0
    assert machine.reader.stats.local == 1
    assert machine.writer.stats.grants == {"timeout": 1}


def test_blocks_a_running_prompt_loses_during_a_read_are_sent_again() -> None:
    """The reader first copies blocks that others have overwritten, and then the right ones."""
    machine = DisaggMachine()
    machine.begin("full", "direct async", 0)
    machine.stick(True)
    machine.ask(0, 60, 2)
    exports = machine.writer.exports
    assert exports is not None
    while not any(export.sent for export in exports._by_name.values()):
        machine.talk(0, 1)
        machine.run_writer(1)
        machine.run_reader(1)
    machine.talk(0, 1)
    machine.run_reader(1)
    (export,) = exports._by_name.values()
    assert export.held is None
    machine.preempt_writer()
    draw = random.Random(1)
    for i in range(3):
        machine.writer.add(f"other{i}/0", [draw.randrange(VOCAB) for _ in range(30)], 2)
    machine.run_writer(2)
    machine.stick(False)
    machine.teardown()
    assert machine.fetched == 1
    assert machine.reader.stats.blocks_received > 56 // SIZE


@pytest.mark.parametrize("way", ["async", "direct async", "direct layers"])
@pytest.mark.parametrize("seed", range(12))
def test_blocks_lost_during_a_read_are_sent_again(seed: int, way: str) -> None:
    """Requests are preempted while their blocks are read, and others reuse the blocks."""
    draw = random.Random(seed)
    machine = DisaggMachine()
    machine.begin(draw.choice(["full", "window"]), way, seed)
    for _ in range(4):
        machine.ask(draw.randrange(3), draw.randrange(25, 41), 2)
    machine.run_reader(1)
    for pull in list(machine.reader.puller.pulls):
        machine.advance(pull)
        machine.advance(pull)
    for _ in range(30):
        machine.run_writer(1)
        if draw.random() < 0.2:
            machine.preempt_writer()
        machine.talk(draw.randrange(4), 2)
        if way != "async":
            machine.run_reader(1)
    machine.teardown()
    assert machine.fetched == 4


def test_layers_can_be_read_while_the_step_that_computes_them_runs() -> None:
    """Blocks are announced with the step that fills them when it is planned, and the end of the
    transfer does not wait for the writer's loop."""
    machine = DisaggMachine()
    machine.begin("full", "direct layers", 0)
    machine.ask(0, 17, 2)
    machine.run_reader(1)
    (pull,) = machine.reader.puller.pulls
    machine.advance(pull)
    writer, named = machine.writer, []
    first = writer.scheduler.plan()
    assert first is not None
    writer.executor.submit(first)
    machine.advance(pull)  # the reader comes when a step runs already
    assert pull.wire is not None

    def note() -> None:
        batches = [message for message in pull.wire.out if isinstance(message, BlockBatch)]
        named.append([(batch.first, batch.count, batch.step) for batch in batches])

    note()  # the loop, in the midst of the step, has not heard of the reader
    plan = writer.scheduler.plan()
    assert plan is not None
    writer.executor.submit(plan)
    assert not plan.transfers
    note()
    # Nine tokens of a step are two whole blocks.
    assert named == [[(0, 2, 0)], [(0, 2, 0), (2, 2, 1)]]
    for event in writer.news:
        writer.exports.handle(event)  # type: ignore[union-attr]
    writer.news = []
    assert sum(isinstance(message, GrantAccepted) for message in pull.wire.out) == 1
    for _ in range(2):
        writer.scheduler.update(writer.executor.collect())
    assert pull.wire.promise is not None
    machine.teardown()
    assert machine.fetched == 1


def test_a_grant_names_blocks_to_the_first_who_shows_it() -> None:
    machine = DisaggMachine()
    machine.begin("full", "direct layers", 0)
    machine.ask(0, 17, 2)
    machine.run_reader(1)
    (pull,) = machine.reader.puller.pulls
    machine.advance(pull)
    writer, grant = machine.writer, pull.grant
    assert grant is not None
    plan = writer.scheduler.plan()
    assert plan is not None
    writer.executor.submit(plan)
    guess, second = Wire(writer), Wire(writer)
    guess.hear(OpenGrant(msgspec.structs.replace(grant, reader="other")))
    assert not guess.out
    machine.advance(pull)
    second.hear(OpenGrant(grant))
    assert not second.out
    machine.run_writer(1)
    for wire in (guess, second):
        (refused, end) = wire.out
        assert isinstance(refused, GrantRefused)
        assert (refused.status, end) == (403, None)
        wire.stop()
    machine.teardown()
    assert machine.fetched == 1


@pytest.mark.parametrize(
    ("kind", "way", "later"),
    [("full", "async", 1), ("full", "sync", 2), ("window", "sync", 2), ("state", "sync", 3)],
)
def test_a_prompt_s_last_blocks_leave_soon(kind: str, way: str, later: int) -> None:
    """Counts plans between the one that computes a prompt's last tokens and the one that sends
    them, while another prompt runs. With "async", sending does not wait for the step's result."""
    machine = DisaggMachine()
    machine.begin(kind, way, 0)
    machine.ask(0, 17, 2)
    machine.run_reader(1)
    (pull,) = machine.reader.puller.pulls
    machine.advance(pull)
    machine.advance(pull)
    writer, plans = machine.writer, []
    submit = writer.executor.submit
    writer.executor.submit = lambda plan: (plans.append(plan), submit(plan))  # type: ignore[assignment,func-returns-value]
    writer.add("other/0", [1] * 60, 1)
    for _ in range(12):
        writer.step()
    lane = plans[0].admits[0].lane
    computed = max(i for i, plan in enumerate(plans[:4]) if lane in plan.lanes)
    sent = max(i for i, plan in enumerate(plans) if plan.transfers)
    assert sent - computed == later
    machine.teardown()
    assert machine.fetched == 1
