"""Random arrivals, finishes, aborts, forks, priorities and shortages of blocks, with an executor
that checks every read and write. Each request ends with the tokens it would get alone."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from quire.arrays import Int32, int32
from quire.config import SchedulerConfig
from quire.errors import RequestError
from quire.features.kv_offload.costs import CostModel, Rates
from quire.features.kv_offload.feature import OffloadFeature
from quire.features.kv_offload.tiers import GroupTier
from quire.plan import DRAFT_IDS, DRAFT_START, KVGroup, RowFlag
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.scheduler import Feature, Order, PlanBuilder, Scheduler
from quire.scheduler.fair_share import FairShare
from quire.scheduler.waiting import MOST_PREEMPTIONS
from tests.brain import Loop, check_scheduler
from tests.fakes import FakeExecutor, expected_output
from tests.slow import examples

_LONGEST = 48
_MOST_REQUESTS = 24
_WIDTH = 12
"""Draft tokens of a claim."""
_STEMS = [[random.Random(seed).randrange(4) for _ in range(_LONGEST)] for seed in range(2)]


class Drafts(Feature):
    """Asks for random numbers of drafts. The drafts are right, wrong, or late: written with a later
    step's plan, when the row has advanced."""

    def __init__(self, seed: int, text_of: Callable[[Request], list[int]]) -> None:
        self._random = random.Random(seed)
        self._text_of = text_of
        self._late: list[tuple[int, list[int], int]] = []

    def lookahead(self, lanes: Int32, room: Int32) -> Int32:
        counts = [self._random.randint(0, 4) for _ in lanes]
        return np.minimum(int32(counts), room)

    def plan(self, builder: PlanBuilder) -> None:
        claims, self._late = self._late, []
        for row, request in enumerate(builder.requests):
            if builder.flags[row] & RowFlag.PROMPT or self._random.random() < 0.3:
                continue
            claim = self._claim(request, int(builder.lanes[row]))
            (self._late if self._random.random() < 0.3 else claims).append(claim)
        claims = [*{lane: (lane, ids, start) for lane, ids, start in claims}.values()]
        if claims:
            lanes, ids, starts = zip(*claims, strict=True)
            builder.write(DRAFT_IDS, int32(lanes), int32(ids))
            builder.write(DRAFT_START, int32(lanes), int32(starts))

    def _claim(self, request: Request, lane: int) -> tuple[int, list[int], int]:
        start = self._random.randint(-1, request.known + 2)
        text = self._text_of(request)[max(start, 0) :][:_WIDTH]
        text = text[: self._random.randint(0, _WIDTH)]
        if text and self._random.random() < 0.3:
            text[self._random.randrange(len(text))] = 1
        return lane, text + [-1] * (_WIDTH - len(text)), start


class Gate(Feature):
    """Keeps requests whose name ends in 0 waiting until they are woken."""

    def __init__(self) -> None:
        self.open: set[str] = set()

    def ready(self, request: Request) -> bool:
        return not request.request_id.endswith("0") or request.request_id in self.open


class SchedulerMachine(RuleBasedStateMachine):
    windows: tuple[int | None, ...] = (None,)
    slots = 0
    """Beyond one for each lane; without any there is no recurrent state."""
    host_blocks: tuple[int, ...] = ()
    failing = 0.0

    @initialize(
        block_size=st.sampled_from([1, 2, 4, 8]),
        pool=st.integers(60, 150),
        lanes=st.sampled_from([1, 3, 8]),
        budget=st.sampled_from([1, 3, 9, 60]),
        depth=st.integers(1, 3),
        pipeline_depth=st.sampled_from([1, 3]),
        caching=st.booleans(),
        chunked=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
        drafts=st.booleans(),
        logit_rows=st.sampled_from([None, 0, 3, 40]),
        fair=st.booleans(),
        vocab=st.sampled_from([2, 40]),
        seed=st.integers(0, 1000),
    )
    def begin(
        self,
        block_size: int,
        pool: int,
        lanes: int,
        budget: int,
        depth: int,
        pipeline_depth: int,
        caching: bool,
        chunked: bool,
        policy: str,
        drafts: bool,
        logit_rows: int | None,
        fair: bool,
        vocab: int,
        seed: int,
    ) -> None:
        groups = [
            KVGroup(
                layers=(i,),
                kind="full" if window is None else "window",
                tokens_per_block=block_size,
                window=window,
            )
            for i, window in enumerate(self.windows)
        ]
        counts = [-(-pool // block_size)] * len(groups)
        if self.slots:
            groups.append(KVGroup(layers=(9,), kind="state", tokens_per_block=block_size))
            counts.append(lanes + seed % self.slots)
            drafts = False  # states cannot be rolled back to before a rejected draft
        self.salts: dict[str, str] = {}
        self.executor = FakeExecutor(
            groups,
            counts,
            vocab=vocab,
            stop_token=0,
            seed=seed,
            salt_of=self.salts.__getitem__,
            host_blocks=self.host_blocks,
            failing=self.failing,
            drafts=8 if drafts else 0,
            logit_rows=None if logit_rows is None else lanes + logit_rows,
        )
        config = SchedulerConfig(
            max_num_seqs=lanes,
            max_num_batched_tokens=budget,
            max_model_len=_LONGEST,
            steps_in_flight=depth,
            pipeline_depth=min(pipeline_depth, depth),
            enable_prefix_caching=caching,
            enable_chunked_prefill=chunked,
            policy="priority" if policy == "priority" else "fcfs",
        )
        self.gate = Gate()
        features: list[Feature] = [self.gate, *self.more()]
        if drafts:
            features.append(Drafts(seed, self.text_of))
        self.fair = fair
        order = FairShare(config) if fair else Order(config)
        self.scheduler = Scheduler(config, self.executor.start(), features, order)
        self.loop = Loop(self.scheduler, self.executor)
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.made = 0

    def more(self) -> list[Feature]:
        return []

    def text_of(self, request: Request) -> list[int]:
        """Returns a request's prompt and all tokens it will generate."""
        output = expected_output(request, self.executor.vocab, self.executor.stop_token)
        return request.tokens.view(0, request.prompt_len).tolist() + output

    @rule(
        stem=st.integers(0, 1),
        shared=st.integers(0, 40),
        own=st.lists(st.integers(0, 3), max_size=4),
        output=st.integers(1, 30),
        count=st.sampled_from([1, 1, 3]),
        priority=st.integers(-2, 2),
        salt=st.sampled_from(["", "", "x"]),
        tenant=st.sampled_from(["", "", "a", "b"]),
        prompt_logprobs=st.booleans(),
        data=st.data(),
    )
    def arrive(
        self,
        stem: int,
        shared: int,
        own: list[int],
        output: int,
        count: int,
        priority: int,
        salt: str,
        tenant: str,
        prompt_logprobs: bool,
        data: st.DataObject,
    ) -> None:
        before = _STEMS[stem][:shared]
        if self.loop.finished and data.draw(st.booleans()):
            # The next turn of an earlier conversation.
            earlier = self.loop.finished[data.draw(st.sampled_from(sorted(self.loop.finished)))]
            before = earlier.tokens.view().tolist()[: _LONGEST - 10]
        prompt = int32(before + own)
        params = SamplingParams(prompt_logprobs=0 if prompt_logprobs else None)
        leader = None
        for index in range(count):
            if self.made == _MOST_REQUESTS:
                return
            self.made += 1
            name = f"r{self.made}"
            self.salts[name] = salt
            request = Request(
                name,
                prompt,
                params,
                max_total=min(_LONGEST, len(prompt) + output),
                arrival=self.made / 4,
                priority=priority,
                sample_index=index,
                leader=leader,
                cache_salt=salt,
                tenant=tenant if self.fair else "",
                share=2.0 if tenant == "b" else 1.0,
            )
            try:
                self.scheduler.add(request)
            except RequestError:
                return
            self.requests[name] = request
            leader = leader or request

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        request = self.scheduler.abort(name)
        assert (request is None) == (name in self.aborted or name in self.loop.finished)
        if request is not None:
            self.aborted.add(name)
        check_scheduler(self.scheduler)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def wake(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.gate.open.add(name)
        self.scheduler.wake(name)

    @rule(steps=st.integers(1, 4))
    def launch(self, steps: int) -> None:
        for _ in range(steps):
            self.loop.launch()

    @precondition(lambda self: self.scheduler.num_in_flight)
    @rule()
    def collect(self) -> None:
        self.loop.collect()

    @rule(steps=st.integers(1, 12))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            if not self.loop.launch() and self.scheduler.num_in_flight:
                self.loop.collect()

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        for name in self.requests:
            self.gate.open.add(name)
            self.scheduler.wake(name)
        self.loop.drain()
        for name, request in self.requests.items():
            assert request.finished
            if self.windows == (None,):
                assert request.num_preemptions <= MOST_PREEMPTIONS
            if name in self.aborted:
                continue
            expected = expected_output(request, self.executor.vocab, self.executor.stop_token)
            assert self.loop.outputs[name] == expected
            if request.params.prompt_logprobs is not None and request.leader is None:
                got = self.loop.prompt_logprobs.get(name, {})
                assert sorted(got) == list(range(1, request.prompt_len))
        assert self.scheduler.reset_prefix_cache()
        stats = self.scheduler.stats()
        assert stats.blocks_free == stats.blocks_total
        assert (stats.running, stats.waiting) == (0, 0)


class TieredMachine(SchedulerMachine):
    """With a host pool, without and with files; some transfers fail."""

    host_blocks = (9,)
    files = False

    def more(self) -> list[Feature]:
        always = CostModel(Rates(prefill=1.0, out=1e9, into=1e9, latency=0.0), token_bytes=1.0)
        files = [] if self.files else None
        self.of_groups = [
            GroupTier(index, slots, 1, files, 30, state=group.kind == "state")
            for index, (slots, group) in enumerate(
                zip(self.host_blocks, self.executor.capacity.groups, strict=True)
            )
        ]
        self.tiers = OffloadFeature(self.of_groups, always)
        return [self.tiers]

    @rule()
    def forget(self) -> None:
        self.scheduler.reset_prefix_cache()
        check_scheduler(self.scheduler)

    @rule()
    def evict_all(self) -> None:
        self.tiers.evict_all()
        self.tiers.save()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "tiers"):
            assert not self.tiers._jobs
            for tier, slots in zip(self.of_groups, self.host_blocks, strict=True):
                assert not tier.arriving
                assert len(tier.host) + tier.host.num_free == slots


class FailingMachine(TieredMachine):
    files = True
    failing = 0.2


class WindowedMachine(SchedulerMachine):
    windows = (None, 6)


class RecurrentMachine(SchedulerMachine):
    slots = 12


class TieredRecurrentMachine(TieredMachine):
    slots = 6
    host_blocks = (9, 5)


class FailingRecurrentMachine(TieredMachine):
    """Transfers of two groups that keep every position, and of one of states; some fail."""

    windows = (None, None)
    slots = 6
    host_blocks = (9, 7, 5)
    files = True
    failing = 0.2


class WindowedRecurrentMachine(RecurrentMachine):
    windows = (None, 6)


_SETTINGS = settings(max_examples=examples(60), stateful_step_count=40)
TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = _SETTINGS
TestWindowedMachine = WindowedMachine.TestCase
TestWindowedMachine.settings = _SETTINGS
TestRecurrentMachine = RecurrentMachine.TestCase
TestRecurrentMachine.settings = _SETTINGS
TestWindowedRecurrentMachine = WindowedRecurrentMachine.TestCase
TestWindowedRecurrentMachine.settings = _SETTINGS
TestTieredRecurrentMachine = TieredRecurrentMachine.TestCase
TestTieredRecurrentMachine.settings = _SETTINGS
TestFailingRecurrentMachine = FailingRecurrentMachine.TestCase
TestFailingRecurrentMachine.settings = _SETTINGS
TestTieredMachine = TieredMachine.TestCase
TestTieredMachine.settings = _SETTINGS
TestFailingMachine = FailingMachine.TestCase
TestFailingMachine.settings = _SETTINGS
