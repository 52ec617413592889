"""Grammars whose masks come late at random, with drafts, preemption, aborts and siblings: every
request ends with the tokens that it gives alone and in time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from quire import LLM, SamplingParams
from quire.engine.loop.core import EngineCore
from quire.features.speculation.verifier import Verifier
from quire.features.structured_output.compiler import Cache
from quire.features.structured_output.feature import GrammarFeature
from quire.features.structured_output.mask_builders import MaskThread
from quire.input_memory import InputMemory
from quire.plan import StepPlan
from quire.request import Request
from quire.runner.hooks.mask import Mask
from tests.features.structured_output.test_engine import DATES, PERSON, asks, structured
from tests.slow import examples, slow

PROMPTS = [
    "Once upon a time",
    "A record of a person:",
    "The dog and the cat",
    "Numbers: 1, 2, 3, 4" * 4,
]
PARAMS = [
    asks(PERSON, seed=1, max_tokens=40),
    asks(DATES, seed=2, n=2, max_tokens=40),
    asks(PERSON, temperature=0.0, max_tokens=30, logprobs=1),
    SamplingParams(structured_outputs=structured(regex="[ab]{3,9}(c|d)+"), seed=3, max_tokens=14),
    SamplingParams(bad_token_ids=((300,), (301, 302)), seed=4, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=16, repetition_penalty=1.2, ignore_eos=True),
]
SIZES: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 6, "dtype": "float32"}
ENGINES: dict[str, dict[str, Any]] = {
    "two": {"steps_in_flight": 2, "num_kv_blocks": 200},
    "few-blocks": {"steps_in_flight": 3, "num_kv_blocks": 10, "max_num_batched_tokens": 32},
    "drafts": {"steps_in_flight": 2, "num_kv_blocks": 12,
               "speculative": {"method": "draft", "num_speculative_tokens": 3}},
    "lookup": {"steps_in_flight": 3, "num_kv_blocks": 60,
               "speculative": {"method": "suffix", "lookup_min": 1}},
}  # fmt: skip

Job = tuple[str, SamplingParams]


class Deadlines:
    """Lets heads run before all their masks are there, at random: some masks are withheld until the
    head has run, or waits for them."""

    def __init__(self) -> None:
        self.random = random.Random(0)
        self.share = 0.0
        self._withheld: list[tuple[InputMemory, int, int]] = []
        self._lock = threading.Lock()
        self._missing, self._put = Mask.inputs_missing, InputMemory.put
        self._built = GrammarFeature._built

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(InputMemory, "put", lambda inputs, *args: self.put(inputs, *args))
        patch.setattr(
            Mask, "inputs_missing", lambda hook, plan, wait: self.missing(hook, plan, wait)
        )
        patch.setattr(GrammarFeature, "_built", lambda feature, lane: self.built(feature, lane))

    def put(self, inputs: InputMemory, step_id: int, lane: int) -> None:
        with self._lock:
            if self.random.random() < self.share:
                self._withheld.append((inputs, step_id, lane))
                return
        self._put(inputs, step_id, lane)

    def missing(self, hook: Mask, plan: StepPlan, wait: bool) -> bool:
        if plan.gated and self.random.random() < self.share:
            return False
        self._release()
        while wait and self._missing(hook, plan, wait=False):
            time.sleep(1e-4)
            self._release()
        return self._missing(hook, plan, wait=wait)

    def built(self, feature: GrammarFeature, lane: int) -> bool:
        self._release()
        return self._built(feature, lane)

    def _release(self) -> None:
        with self._lock:
            withheld, self._withheld = self._withheld, []
        for inputs, step_id, lane in withheld:
            self._put(inputs, step_id, lane)


DEADLINES = Deadlines()
_llms: dict[str, LLM] = {}
_alone: dict[str, list[list[int]]] = {}


@pytest.fixture(scope="module", autouse=True)
def engines() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # Nothing is measured, so drafts cost nothing, and there are many.
        patch.setattr(Verifier, "seconds", lambda hook, program, graphs: {})
        # Steps use several sets of lines in turn, as with several ranks.
        shape = Mask._shape
        patch.setattr(Mask, "_shape", lambda hook, limits, shared: shape(hook, limits, shared=True))
        DEADLINES.patch(patch)
        yield
        while _llms:
            _llms.popitem()[1].shutdown()


def llm_of(name: str) -> LLM:
    if name not in _llms:
        _llms[name] = LLM(**SIZES, **({"num_kv_blocks": 200} if name == "plain" else ENGINES[name]))
        _llms[name].generate("a", PARAMS[0], use_tqdm=False)  # which opens the feature
    return _llms[name]


def add(llm: LLM, name: str, job: Job) -> list[Request]:
    prompt = llm.get_tokenizer().encode(job[0])
    most = len(prompt) + (job[1].max_tokens or 9)
    return llm._core.add(name, prompt, job[1], max_total=most)


def alone(job: Job) -> list[list[int]]:
    """Returns the tokens of a request's completions where nothing is late."""
    key = repr(job)
    if key not in _alone:
        DEADLINES.share, llm = 0.0, llm_of("plain")
        requests = add(llm, "alone", job)
        while llm._core.has_work():
            llm._core.step()
        _alone[key] = [request.output.tolist() for request in requests]
    return _alone[key]


def forget_grammars(llm: LLM) -> None:
    """Lets grammars be compiled anew, while their requests' prompts run."""
    for feature in llm._core._loop_features:
        if isinstance(feature, GrammarFeature):
            feature._late_grammars = True
            builders = feature._builders
            assert isinstance(builders, MaskThread)
            builders.compiler._compiled = Cache(builders.compiler.config.cached)


class LateMasks(RuleBasedStateMachine):
    @initialize(
        name=st.sampled_from(sorted(ENGINES)), late=st.sampled_from([0.2, 0.6, 1.0]),
        seed=st.integers(0, 99), compiled=st.booleans(),
    )  # fmt: skip
    def begin(self, name: str, late: float, seed: int, compiled: bool) -> None:
        self.llm = llm_of(name)
        if not compiled:
            forget_grammars(self.llm)
        self.core: EngineCore = self.llm._core
        DEADLINES.share, DEADLINES.random = late, random.Random(seed)
        self.late_before = self.llm.stats().late_rows
        self.requests: dict[str, tuple[Job, list[Request]]] = {}
        self.gone: set[str] = set()

    @precondition(lambda self: len(self.requests) < 8)
    @rule(prompt=st.sampled_from(PROMPTS), params=st.sampled_from(PARAMS))
    def arrive(self, prompt: str, params: SamplingParams) -> None:
        name = f"r{len(self.requests)}"
        job = prompt, params
        self.requests[name] = job, add(self.llm, name, job)

    @rule(steps=st.integers(1, 9))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            if self.core.has_work():
                self.core.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.gone.add(name)
        self.core.abort(name)

    @precondition(lambda self: self.core.scheduler.num_running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """Preempts a request, as for another one, while rows of it are in flight, late or held."""
        running = self.core.scheduler._running.entries
        self.core.scheduler._preempt(data.draw(st.sampled_from(running))[-1])

    def teardown(self) -> None:
        if not hasattr(self, "llm"):
            return
        while self.core.has_work():
            self.core.step()
        assert self.core.take_failures() == []
        for name, (job, requests) in self.requests.items():
            if name not in self.gone:
                assert [request.output.tolist() for request in requests] == alone(job)
        assert not any(self.llm.stats().blocks_used)
        for feature in self.core._loop_features:
            if isinstance(feature, GrammarFeature):
                assert not feature._held
                assert not feature._planned
                assert not feature._masked
                assert not feature._by_key


TestLateMasks = LateMasks.TestCase
TestLateMasks.settings = settings(
    max_examples=examples(12), stateful_step_count=12, suppress_health_check=list(HealthCheck),
    deadline=None,
)  # fmt: skip


@pytest.mark.parametrize("name", [slow("few-blocks"), "two", slow("drafts"), slow("lookup")])
def test_a_batch_of_late_rows(name: str) -> None:
    """Late rows are many, and counted."""
    jobs = [(PROMPTS[i % 3], PARAMS[i % len(PARAMS)]) for i in range(9)]
    expected = [alone(job) for job in jobs]
    llm = llm_of(name)
    DEADLINES.share, DEADLINES.random = 0.7, random.Random(1)
    before = llm.stats()
    added = [add(llm, f"b{i}", job) for i, job in enumerate(jobs)]
    while llm._core.has_work():
        llm._core.step()
    assert [[request.output.tolist() for request in requests] for requests in added] == expected
    stats = llm.stats()
    assert stats.late_rows - before.late_rows > 20
    if stats.speculation is not None:
        assert sum(source.accepted for source in stats.speculation.sources.values()) > 0
