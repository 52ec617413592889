"""Rows with a grammar and drafts made on the device: tokens, log-probabilities and ends equal those
without drafts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.features.speculation.draft_count import StepCosts
from quire.features.speculation.draft_head import HeadDrafter
from quire.features.speculation.draft_model import DraftModel
from quire.features.speculation.feature import SpeculationFeature
from quire.features.speculation.settings import DEVICE, MASKED
from quire.features.speculation.stats import SourceStats
from quire.features.speculation.verifier import Verifier
from quire.outputs import CompletionOutput
from tests.features.structured_output.test_engine import DATES, PERSON
from tests.slow import slow

DRAFT = {"speculative": {"method": "draft", "num_speculative_tokens": 3}}
EAGLE3 = {"speculative": {"method": "eagle3", "num_speculative_tokens": 3}}
STORY = {"type": "object", "properties": {"story": {"type": "string", "maxLength": 90}},
         "required": ["story"], "additionalProperties": False}  # fmt: skip
TEXT = {"regex": r"[A-Za-z ,.!?'\n]{1,200}"}
GREEDY = {"temperature": 0.0, "max_tokens": 18}
SAMPLED = {"temperature": 0.8, "max_tokens": 18, "seed": 4}


def schema(one: Any) -> dict[str, str]:
    return {"json": json.dumps(one)}


def chat(asked: str) -> str:
    return f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"


JOBS: list[tuple[str, dict[str, Any]]] = [
    ("Tell me a story about a little fox.", {**GREEDY, "structured_outputs": TEXT}),
    ("Tell me a story about a cat.", {**SAMPLED, "structured_outputs": TEXT, "logprobs": 2}),
    ("Name three fruits.", {**SAMPLED, "structured_outputs": schema(PERSON), "n": 2}),
    ("Which days?", {**GREEDY, "structured_outputs": schema(DATES)}),
    ("A story as JSON.", {**SAMPLED, "structured_outputs": schema(STORY), "top_k": 20}),
    (
        "Tell me a story about a dog.",
        {**GREEDY, "structured_outputs": TEXT, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    ),
    # The stop string ends in the middle of the tokens accepted in one step.
    ("Who are you?", {**GREEDY, "structured_outputs": TEXT, "stop": ["help", " a "]}),
    ("Say yes or no.", {**GREEDY, "structured_outputs": {"choice": ["yes", "no", "yes and no"]}}),
    ("Who are you?", {**GREEDY, "structured_outputs": {"regex": "I am.*"}, "min_tokens": 12}),
    ("What can you do?", {**SAMPLED, "bad_token_ids": ((300,), (301, 302)), "logprobs": 1}),
    ("Say abc.", {**GREEDY, "structured_outputs": {"regex": "(abc )+"}, "ignore_eos": True}),
    ("Tell me a story about a fish.", {**SAMPLED, "ignore_eos": True}),
]
SIZES: dict[str, Any] = {"num_kv_blocks": 300, "max_model_len": 192, "max_num_seqs": 16}

Answers = list[tuple[list[int], str, str | None, list[Any]]]


@pytest.fixture(scope="module", autouse=True)
def free_drafts() -> Iterator[None]:
    """Without measured costs, drafts count as free, so there are many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Verifier, "seconds", lambda hook, program, graphs: {})
        yield


@pytest.fixture(scope="module")
def llms() -> Iterator[dict[str, LLM]]:
    """An engine without drafts, and engines that draft, by their source."""
    made = {
        "plain": LLM(**SIZES),
        "draft": LLM(**SIZES, **DRAFT, steps_in_flight=2),
        "eagle3": LLM(**SIZES, **EAGLE3),
    }
    yield made
    for llm in made.values():
        llm.shutdown()


@pytest.fixture(scope="module")
def plain(llms: dict[str, LLM]) -> Answers:
    """The answers without drafts."""
    return answers(llms["plain"])


def answers(llm: LLM, jobs: list[tuple[str, dict[str, Any]]] = JOBS) -> Answers:
    params = [SamplingParams(**asked) for _, asked in jobs]
    outputs = llm.generate([chat(text) for text, _ in jobs], params, use_tqdm=False)
    return [
        (list(c.token_ids), c.text, c.finish_reason, told(c)) for o in outputs for c in o.outputs
    ]


def told(output: CompletionOutput) -> list[Any]:
    """Returns a completion's log-probabilities, rounded."""
    return [
        {token: (round(one.logprob, 3), one.rank) for token, one in place.items()}
        for place in output.logprobs or ()
    ]


def counted(llm: LLM) -> SourceStats:
    """Returns the counts of the only source of drafts."""
    stats = llm.stats().speculation
    assert stats is not None
    (found,) = stats.sources.values()
    return found


@pytest.mark.parametrize("source", ["draft", "eagle3"])
def test_drafts_change_only_the_speed(plain: Answers, llms: dict[str, LLM], source: str) -> None:
    assert answers(llms[source]) == plain
    drafts = counted(llms[source])
    assert drafts.accepted == sum(drafts.accepted_at) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {**DRAFT, "steps_in_flight": 3},
        {**DRAFT, "max_num_batched_tokens": 48, "steps_in_flight": 2},
        {**EAGLE3, "steps_in_flight": 2},
        {"speculative": {"method": "eagle3"}, "max_num_seqs": 3},
        {"speculative": {}, "steps_in_flight": 2},
    ],
    ids=str,
)
def test_in_other_engines(plain: Answers, settings: dict[str, Any]) -> None:
    llm = LLM(**{**SIZES, **settings})
    assert answers(llm) == plain
    llm.shutdown()


@pytest.mark.parametrize("settings", [{**DRAFT, "steps_in_flight": 2}, slow(EAGLE3)], ids=str)
def test_preempted_requests_go_on(llms: dict[str, LLM], settings: dict[str, Any]) -> None:
    jobs = [(text, {**asked, "max_tokens": 34}) for text, asked in JOBS[:5]]
    llm = LLM(**{**SIZES, **settings, "num_kv_blocks": 12})
    answers(llm, jobs)  # grammars that are compiled let all begin at once
    assert answers(llm, jobs) == answers(llms["plain"], jobs)
    assert llm.stats().preemptions > 0
    llm.shutdown()


@pytest.mark.parametrize("source", ["draft", "eagle3"])
def test_a_text_under_a_grammar_takes_fewer_steps(
    plain: Answers, llms: dict[str, LLM], source: str
) -> None:
    """Only the device drafts, and steps still give more than one token on average."""
    llm = llms[source]
    steps, before = llm.stats().steps, counted(llm).accepted if llm.stats().steps else 0
    assert answers(llm, JOBS[:1]) == plain[:1]
    steps = llm.stats().steps - steps
    assert counted(llm).accepted - before >= len(plain[0][0]) - steps
    assert len(plain[0][0]) > 1.3 * steps


# -- drafts that are broken --------------------------------------------------------------------

Breaks = Callable[[Tensor], Tensor]


def at_random(logits: Tensor) -> Tensor:
    return torch.rand(logits.shape, generator=torch.Generator().manual_seed(len(logits)))


def of_one_token(token: int) -> Breaks:
    def made(logits: Tensor) -> Tensor:
        return torch.zeros_like(logits).index_fill_(1, torch.tensor([token]), 50.0)

    return made


def none(logits: Tensor) -> Tensor:
    return torch.full_like(logits, torch.nan)


def broken(patch: pytest.MonkeyPatch, made: Breaks) -> None:
    """Makes the draft model sample from other logits."""
    for drafter in (DraftModel, HeadDrafter):
        own = drafter.pass_logits
        patch.setattr(drafter, "pass_logits", lambda hook, x, own=own: made(own(hook, x)))


@pytest.mark.parametrize(
    ("made", "source"),
    [
        (at_random, "draft"),
        # A token that is not the tokenizer's, which a grammar's matcher does not know.
        (of_one_token(6143), "draft"),
        slow(of_one_token(6139), "eagle3"),
        slow(none, "draft"),
        (none, "eagle3"),
        slow(at_random, "eagle3"),
        slow(of_one_token(0), "draft"),
    ],
    ids=["random", "unknown", "ends", "empty", "empty-eagle3", "random-eagle3", "first"],
)
def test_broken_drafts_change_nothing(
    plain: Answers, llms: dict[str, LLM], monkeypatch: pytest.MonkeyPatch, made: Breaks, source: str
) -> None:
    llm = llms[source]
    before = counted(llm) if llm.stats().steps else SourceStats()
    drafted, accepted = before.drafted, before.accepted
    broken(monkeypatch, made)
    assert answers(llm) == plain
    after = counted(llm)
    assert after.drafted - drafted > 100
    assert after.accepted - accepted < 0.1 * (after.drafted - drafted)


def test_acceptance_under_a_grammar_does_not_affect_other_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts refused by grammars do not lower the expected acceptance of other rows. Rows whose
    drafts fail get no drafts if these have a cost."""
    broken(monkeypatch, of_one_token(0))
    llm = LLM(**SIZES, **DRAFT)
    (feature,) = [f for f in llm._core._loop_features if isinstance(f, SpeculationFeature)]
    feature._costs = StepCosts({"decode": {1: 1.0}, "verify": {1: 1.0, 2: 1.2, 4: 2.0}})
    before = feature._acceptance.of_kinds()
    asked = {**GREEDY, "ignore_eos": True, "structured_outputs": {"regex": "[a-z ]{300}"}}
    llm.generate("Once", SamplingParams(**asked), use_tqdm=False)
    after = feature._acceptance.of_kinds()
    assert after[DEVICE] == before[DEVICE]
    assert after[MASKED] < 0.7 * before[MASKED]
    assert 0 < counted(llm).drafted < 12
    llm.shutdown()
