"""Beam search through the API, with the official client, equal to `LLM.beam_search`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from quire import LLM, BeamSearchParams
from tests.server.server_process import MODEL, Server

PROMPT = "Once upon a time"
HELLO: list[Any] = [{"role": "user", "content": "Hello there!"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    engine = LLM(device="cpu", num_kv_blocks=200)
    yield engine
    engine.shutdown()


def complete(client: openai.OpenAI, extra: dict[str, Any], **fields: Any) -> Any:
    given = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, **fields}
    return client.completions.create(extra_body={"use_beam_search": True, **extra}, **given)


def chat(client: openai.OpenAI, extra: dict[str, Any], **fields: Any) -> Any:
    given = {"model": MODEL, "messages": HELLO, "max_tokens": 8, **fields}
    return client.chat.completions.create(extra_body={"use_beam_search": True, **extra}, **given)


def test_completions(client: openai.OpenAI, llm: LLM) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=8, length_penalty=0.5)
    (expected,) = llm.beam_search(PROMPT, params)
    extra = {"beam_width": 4, "length_penalty": 0.5, "return_token_ids": True}
    answer = complete(client, extra, n=3, logprobs=2)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    for choice, sequence in zip(answer.choices, expected.sequences, strict=False):
        assert choice.text == sequence.text
        assert choice.token_ids == sequence.token_ids
        assert sum(choice.logprobs.token_logprobs) == pytest.approx(sequence.cum_logprob, abs=1e-3)
        assert choice.finish_reason == sequence.finish_reason
    assert answer.usage.completion_tokens == sum(len(c.token_ids) for c in answer.choices)
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    by_best_of = complete(client, {"length_penalty": 0.5}, n=1, best_of=4, temperature=0.0)
    assert [c.text for c in by_best_of.choices] == [expected.sequences[0].text]


def test_several_prompts(client: openai.OpenAI, llm: LLM) -> None:
    prompts = [PROMPT, "The dog"]
    expected = llm.beam_search(prompts, BeamSearchParams(beam_width=2, max_tokens=8))
    answer = complete(client, {}, prompt=prompts, n=2)
    texts = [sequence.text for output in expected for sequence in output.sequences]
    assert [choice.text for choice in answer.choices] == texts


def test_chats(client: openai.OpenAI) -> None:
    wide = chat(client, {"beam_width": 3, "return_token_ids": True}, n=2, logprobs=True)
    assert len({choice.message.content for choice in wide.choices}) == 2
    sums = [sum(e.logprob for e in c.logprobs.content) / len(c.token_ids) for c in wide.choices]
    assert sums == sorted(sums, reverse=True)
    greedy = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=8, temperature=0.0
    )
    alone = chat(client, {"beam_width": 1})
    assert alone.choices[0].message.content == greedy.choices[0].message.content


@pytest.mark.parametrize(
    ("asked", "extra", "fields", "param"),
    [
        (complete, {"beam_width": 65}, {}, "beam_width"),
        (complete, {"beam_width": 2}, {"n": 3}, "beam_width"),
        (complete, {"beam_width": 2}, {"best_of": 3}, "best_of"),
        (complete, {}, {"best_of": 100}, "best_of"),
        (complete, {"use_beam_search": False, "beam_width": 2}, {}, "beam_width"),
        (complete, {"use_beam_search": None, "length_penalty": 1.0}, {}, "length_penalty"),
        (complete, {}, {"temperature": 0.5}, "temperature"),
        (complete, {}, {"stop": ["a"]}, "stop"),
        (complete, {"top_k": 5}, {}, "top_k"),
        (complete, {"guided_regex": "a"}, {}, "use_beam_search"),
        (chat, {}, {"stream": True}, "stream"),
        (chat, {}, {"logit_bias": {"5": 1}}, "logit_bias"),
    ],
)
def test_refusals(
    client: openai.OpenAI, asked: Any, extra: dict[str, Any], fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        asked(client, extra, **fields)
    assert caught.value.param == param


def test_tokens_and_requests_of_beam_search_are_counted(
    client: openai.OpenAI, server: Server
) -> None:
    names = ("quire_generation_tokens_total", "quire_requests_running")
    before = server.metric(names[0])
    complete(client, {"beam_width": 3, "ignore_eos": True}, n=2)
    assert server.metric(names[0]) == before + 16
    server.wait_for(lambda: server.metric(names[1]) == 0, "the requests to end")
