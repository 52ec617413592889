"""Masks that other processes build: the same texts, also where results are read too late, and an
engine that survives the end of a process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import CompilerBusyError, GrammarError
from quire.features.structured_output.feature import GrammarFeature
from quire.features.structured_output.mask_builders import MaskProcesses
from quire.input_memory import InputMemory, OverwrittenError
from tests.features.structured_output.test_engine import DATES, PERSON, asks, structured

PARAMS = [
    asks(PERSON, seed=1, max_tokens=40),
    asks(DATES, seed=2, n=2, max_tokens=40),
    SamplingParams(structured_outputs=structured(regex="[ab]{3,9}(c|d)+"), seed=3, max_tokens=14),
    SamplingParams(bad_token_ids=((300,), (301, 302)), seed=4, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, max_tokens=24, ignore_eos=True),
    asks(PERSON, seed=6, max_tokens=30, min_tokens=20),
]
PROMPTS = [f"A record {i}:" for i in range(len(PARAMS))]
SIZES: dict[str, Any] = {
    "max_model_len": 128, "max_num_seqs": 6, "num_kv_blocks": 60, "dtype": "float32",
}  # fmt: skip


def texts(llm: LLM) -> list[list[list[int]]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [[list(each.token_ids) for each in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    made = LLM(**SIZES, steps_in_flight=2)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[list[list[int]]]:
    return texts(plain)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM(**SIZES, steps_in_flight=2, structured_outputs_processes=2)
    yield made
    made.shutdown()


def feature_of(llm: LLM) -> GrammarFeature:
    (found,) = (each for each in llm._core._loop_features if isinstance(each, GrammarFeature))
    return found


def pids(llm: LLM) -> list[int]:
    """Returns the processes that build masks."""
    builders = feature_of(llm)._builders
    assert isinstance(builders, MaskProcesses)
    first = builders._process.pid
    with open(f"/proc/{first}/task/{first}/children") as file:
        return [int(each) for each in file.read().split()]


def test_the_same_texts(llm: LLM, expected: list[list[list[int]]]) -> None:
    assert texts(llm) == expected
    stats = llm.stats().grammars
    assert stats.compiles >= 3
    assert all(load.stats.compiles for load in feature_of(llm)._loads)
    with pytest.raises(GrammarError, match="cannot be enforced") as caught:
        llm.generate("a", SamplingParams(structured_outputs=structured(regex="(?=a)b")))
    assert caught.value.code == "invalid_grammar"
    assert not feature_of(llm)._by_key


def test_a_process_that_ends(llm: LLM, expected: list[list[list[int]]]) -> None:
    """A process that ends fails its requests. Others end as they would."""
    texts(llm)
    core, before = llm._core, pids(llm)
    requests = []
    for i in range(6):
        prompt = llm.get_tokenizer().encode(PROMPTS[i])
        requests += core.add(f"k{i}", prompt, PARAMS[i], max_total=len(prompt) + 40)
    for _ in range(12):
        core.step()
    os.kill(before[0], signal.SIGKILL)
    while core.has_work():
        core.step()
    failures = core.take_failures()
    assert 0 < len(failures) < len(requests)
    assert all(isinstance(error, CompilerBusyError) for _, error in failures)
    failed = {request.request_id for request, _ in failures}
    whole = [tokens for completions in expected for tokens in completions]
    for request, tokens in zip(requests, whole, strict=True):
        if request.request_id not in failed:
            assert request.output.tolist()[: len(tokens)] == tokens
    assert texts(llm) == expected
    assert pids(llm) != before
    assert not any(llm.stats().blocks_used)


def test_results_that_are_read_too_late(
    plain: LLM, expected: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine says which tokens are known, and the request goes on from there."""
    result, again, calls = InputMemory.result, GrammarFeature._again, 0
    lost = []

    def overwritten(inputs: InputMemory, step_id: int, row: int) -> Any:
        nonlocal calls
        found = result(inputs, step_id, row)
        calls += found is not None
        if found is not None and calls % 7 == 0:
            raise OverwrittenError("later steps have come")
        return found

    def counted(feature: GrammarFeature, masked: Any) -> None:
        lost.append(masked.key)
        again(feature, masked)

    monkeypatch.setattr(InputMemory, "result", overwritten)
    monkeypatch.setattr(GrammarFeature, "_again", counted)
    assert texts(plain) == expected
    assert len(lost) > 5
