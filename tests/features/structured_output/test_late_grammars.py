"""Prompts that run while their grammars are compiled: the same texts, and no request waits for
another's grammar."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.features.structured_output.feature import GrammarFeature
from quire.runner.hooks.mask import Mask
from quire.sampling_params import StructuredOutputsParams
from tests.features.structured_output.test_engine import PERSON, asks, structured

PLAIN = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = ["A record of a person:", "Once upon a time"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM(max_model_len=128, max_num_seqs=4, num_kv_blocks=60, dtype="float32")
    yield made
    made.shutdown()


@pytest.fixture
def late(llm: LLM, monkeypatch: Any) -> GrammarFeature:
    """The engine's feature, with heads that never wait for masks."""
    missing = Mask.inputs_missing
    llm.generate("A", asks(PERSON, max_tokens=2), use_tqdm=False)
    (feature,) = (f for f in llm._core._loop_features if isinstance(f, GrammarFeature))
    monkeypatch.setattr(feature, "_late_grammars", True)
    monkeypatch.setattr(
        Mask, "inputs_missing", lambda hook, plan, wait: missing(hook, plan, wait=False) and False
    )
    return feature


def run(llm: LLM, jobs: list[tuple[str, SamplingParams]], until: Any = None) -> list[list[int]]:
    """Runs requests without the check before, and calls `until` after each step."""
    requests = []
    for i, (prompt, params) in enumerate(jobs):
        ids = llm.get_tokenizer().encode(prompt)
        requests += llm._core.add(str(i), ids, params, max_total=len(ids) + params.max_tokens)
    while llm._core.has_work():
        llm._core.step()
        if until is not None:
            until(requests)
    return [request.output.tolist() for request in requests]


def slow_compiler(feature: Any, monkeypatch: Any) -> threading.Event:
    """Returns a gate that grammars to come wait for."""
    gate, compiler = threading.Event(), feature._builders.compiler
    compile = compiler._compiled_now

    def compiling(key: bytes, params: StructuredOutputsParams) -> Any:
        assert gate.wait(20)
        return compile(key, params)

    monkeypatch.setattr(compiler, "_compiled_now", compiling)
    return gate


def test_a_prompt_runs_while_its_grammar_is_compiled(
    llm: LLM, late: GrammarFeature, monkeypatch: Any
) -> None:
    schema = {**PERSON, "title": "compiled late"}
    jobs = [(PROMPTS[0], asks(schema, seed=3, max_tokens=30)), (PROMPTS[1], PLAIN)]
    alone = [llm.generate(p, each, use_tqdm=False)[0].outputs[0].token_ids for p, each in jobs]
    schema["title"] = "compiled late once more"
    jobs[0] = PROMPTS[0], asks(schema, seed=3, max_tokens=30)
    gate, before = slow_compiler(late, monkeypatch), llm.stats().grammars

    def open_gate(requests: list[Any]) -> None:
        if requests[1].finished and not gate.is_set():
            assert requests[0].computed > 0
            assert not len(requests[0].output)
            gate.set()

    assert run(llm, jobs, open_gate) == alone
    stats = llm.stats().grammars
    assert stats.compile_late_rows == before.compile_late_rows + 1
    assert stats.compiles == before.compiles + 1
    assert stats.compile_seconds > before.compile_seconds
    assert not late._masked


def test_a_request_ends_while_its_grammar_is_compiled(
    llm: LLM, late: GrammarFeature, monkeypatch: Any
) -> None:
    gate = slow_compiler(late, monkeypatch)
    jobs = [(PROMPTS[0], asks({**PERSON, "title": "aborted"}, max_tokens=30)), (PROMPTS[1], PLAIN)]

    def leave(requests: list[Any]) -> None:
        if requests[1].finished:
            llm._core.abort("0")

    assert run(llm, jobs, leave)[0] == []
    gate.set()
    assert not late._compiling
    assert not late._masked


def test_a_grammar_that_fails_after_the_prompt(
    llm: LLM, late: GrammarFeature, monkeypatch: Any
) -> None:
    gate = slow_compiler(late, monkeypatch)
    bad = SamplingParams(structured_outputs=structured(regex="(?=a)b"), max_tokens=4)
    plain = [*map(int, llm.generate(PROMPTS[1], PLAIN, use_tqdm=False)[0].outputs[0].token_ids)]

    def open_gate(requests: list[Any]) -> None:
        if requests[0].computed:
            gate.set()

    assert run(llm, [(PROMPTS[0], bad), (PROMPTS[1], PLAIN)], open_gate) == [[], plain]
    ((request, error),) = llm._core.take_failures()
    assert request.request_id == "0/0"
    assert "cannot be enforced" in str(error)
