"""Fields of OpenAI's two completion routes that change the answer's form, on a real server."""

from __future__ import annotations

import json
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion import Completion

from tests.server.schema import conforms, sse
from tests.server.scripted import MODEL as SCRIPTED
from tests.server.scripted import scripted_engine, serve
from tests.server.server_process import MODEL, Server
from tests.server.test_openai import chat, complete

ADDED = ("stop_reason", "prompt_logprobs")


def post(server: Server, path: str, body: dict[str, Any]) -> str:
    """Returns the raw body of an answer, not parsed by a client."""
    request = urllib.request.Request(
        f"{server.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(response.read().decode())


def test_bodies_have_the_published_shape(server: Server) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": MODEL, "max_tokens": 3, "n": 2, "logprobs": 1}
    answer = conforms(
        Completion, json.loads(post(server, "/v1/completions", {**body, "prompt": "Hi"})), ADDED
    )
    assert len(answer.choices) == 2
    body |= {"messages": messages, "logprobs": True, "top_logprobs": 2, "service_tier": "auto"}
    body |= {"metadata": {"run": "7"}, "store": False, "prompt_cache_key": "k", "user": "u"}
    whole = conforms(ChatCompletion, json.loads(post(server, "/v1/chat/completions", body)), ADDED)
    assert (whole.service_tier, whole.metadata) == ("default", {"run": "7"})
    assert whole.system_fingerprint == answer.system_fingerprint
    options = {"include_usage": True, "include_obfuscation": True}
    text = post(server, "/v1/chat/completions", {**body, "stream": True, "stream_options": options})
    *events, (_, last) = sse(text)
    chunks = [conforms(ChatCompletionChunk, data, ADDED) for _, data in events]
    assert last == "[DONE]"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]
    assert {chunk.service_tier for chunk in chunks} == {"default"}
    assert {chunk.system_fingerprint for chunk in chunks} == {whole.system_fingerprint}
    assert all(len(chunk.obfuscation or "") > 0 for chunk in chunks[:-1])


def test_obfuscated_chunks_are_of_few_sizes(server: Server) -> None:
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 24, "stream": True}
    options = {"include_obfuscation": True}
    parts = post(server, "/v1/completions", {**body, "stream_options": options}).split("\n\n")
    sizes = {len(part.encode()) % 32 for part in parts if "obfuscation" in part}
    assert len(sizes) == 1


def test_usage_in_every_chunk(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    for create in (complete, chat):
        chunks = list(create(client, stream=True, stream_options=options, max_tokens=6))
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 6
        assert all(chunk.usage.prompt_tokens == chunks[0].usage.prompt_tokens for chunk in chunks)
        assert counts[0] < 6


def test_streams_of_n_are_the_same_as_wholes(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"n": 3, "temperature": 2.0, "seed": 11, "max_tokens": 10}
    whole = complete(client, logprobs=2, **options).choices
    texts: dict[int, str] = defaultdict(str)
    tokens: dict[int, list[str]] = defaultdict(list)
    offsets: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, str] = {}
    for chunk in complete(client, logprobs=2, stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens
            offsets[choice.index] += choice.logprobs.text_offset
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert [texts[c.index] for c in whole] == [c.text for c in whole]
    assert [tokens[c.index] for c in whole] == [c.logprobs.tokens for c in whole]
    assert [offsets[c.index] for c in whole] == [c.logprobs.text_offset for c in whole]
    assert [ends[c.index] for c in whole] == [c.finish_reason for c in whole]
    whole = chat(client, logprobs=True, **options).choices
    texts.clear()
    for chunk in chat(client, logprobs=True, stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert [texts[c.index] for c in whole] == [c.message.content for c in whole]
    assert len(set(texts.values())) > 1


def test_best_of(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 1.3, "seed": 5, "max_tokens": 8}
    every = complete(client, n=6, logprobs=0, prompt=["The cat", "A dog"], **options).choices

    def score(choice: Any) -> float:
        values = choice.logprobs.token_logprobs
        return -sum(values) / len(values)

    expected = []
    for start in (0, 6):
        expected += [c.text for c in sorted(every[start : start + 6], key=score)[:2]]
    best = complete(client, n=2, best_of=6, prompt=["The cat", "A dog"], **options)
    assert [choice.text for choice in best.choices] == expected
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert [choice.logprobs for choice in best.choices] == [None] * 4
    assert best.usage.completion_tokens == 12 * 8
    shown = complete(client, best_of=6, logprobs=1, echo=True, prompt="The cat", **options)
    assert shown.choices[0].text == "The cat" + expected[0]
    assert len(shown.choices[0].logprobs.tokens) == shown.usage.prompt_tokens + 8
    same = complete(client, n=2, best_of=2, stream=True, max_tokens=3)
    assert {choice.index for chunk in same for choice in chunk.choices} == {0, 1}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"n": 2, "best_of": 129}, "best_of"),
        ({"prompt": ["a"] * 20, "best_of": 100}, "n"),
        ({"suffix": " the end."}, "suffix"),
        ({"suffix": 5}, "suffix"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"what": True}, "stream": True}, "stream_options.what"),
        ({"stream_options": {"continuous_usage_stats": True, "include_usage": False},
          "stream": True}, "stream_options.continuous_usage_stats"),
        ({"logprobs": 101}, "logprobs"),
        ({"extra_body": {"prompt_logprobs": 1}, "stream": True}, "prompt_logprobs"),
        ({"extra_body": {"prompt_logprobs": 101}}, "prompt_logprobs"),
        ({"extra_body": {"speculative": "on"}}, "speculative"),
        ({"extra_body": {"priority": 3}}, "priority"),
        ({"extra_body": {"min_tokens": 50}, "max_tokens": 5}, "min_tokens"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"extra_body": {"stop_token_ids": [99999999]}}, "stop_token_ids"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"extra_body": {"metadata": {"a": "b"}}}, "metadata"),
        ({"extra_body": {"service_tier": "flex"}}, "service_tier"),
    ],
)  # fmt: skip
def test_errors_of_completions(client: openai.OpenAI, options: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        complete(client, **options)
    assert error.value.param == param
    assert param.rpartition(".")[2] in error.value.message


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {"voice": "alloy", "format": "mp3"}}, "audio"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"extra_body": {"moderation": {"model": "m"}}}, "moderation"),
        ({"extra_body": {"best_of": 2}}, "best_of"),
        ({"extra_body": {"suffix": "x"}}, "suffix"),
        ({"n": 129}, "n"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)  # fmt: skip
def test_errors_of_chat(client: openai.OpenAI, options: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, **options)
    assert error.value.param == param


def test_sampling_fields_take_effect(client: openai.OpenAI) -> None:
    ids: dict[str, Any] = {"return_token_ids": True}

    def tokens(**options: Any) -> list[int]:
        extra = {**ids, **options.pop("extra_body", {})}
        answer = complete(client, max_tokens=20, extra_body=extra, **options)
        return list(answer.choices[0].token_ids)

    greedy = tokens()
    assert tokens(temperature=2.0, seed=1, extra_body={"top_k": 1}) == greedy
    assert tokens(temperature=2.0, seed=1, extra_body={"min_p": 1.0}) == greedy
    assert tokens(temperature=2.0, seed=1, top_p=1e-6) == greedy
    assert tokens(temperature=2.0, seed=1, extra_body={"top_k": 0}) != greedy
    again = tokens(frequency_penalty=2.0, presence_penalty=2.0)
    assert len(set(again)) > len(set(greedy)) or again != greedy
    banned = tokens(logit_bias={str(greedy[0]): -100})
    assert banned[0] != greedy[0]
    assert tokens(extra_body={"repetition_penalty": 1.5}) != greedy
    assert tokens(extra_body={"speculative": "off"}) == greedy


def test_ignore_eos_and_stop_token_ids(client: openai.OpenAI) -> None:
    body = {"model": MODEL, "prompt": "Once", "temperature": 0, "max_tokens": 5}
    biased = {"logit_bias": {"0": 100}}
    ended = client.completions.create(**body, **biased)
    assert ended.usage.completion_tokens in (1, 5)
    kept = client.completions.create(**body, **biased, extra_body={"ignore_eos": True})
    assert kept.usage.completion_tokens == 5


def test_priority(launch: Callable[..., Server]) -> None:
    server = launch("--scheduling-policy", "priority")
    answer = complete(server.client(), extra_body={"priority": -3}, max_tokens=2)
    assert answer.usage.completion_tokens == 2


def test_metrics_of_the_engine(server: Server, client: openai.OpenAI) -> None:
    names = ("quire_engine_prompt_tokens_total", "quire_engine_generation_tokens_total")
    before = [server.metric(name) for name in names]
    queued = server.metric("quire_request_queue_seconds_count")
    answer = complete(client, max_tokens=5, prompt=[50, 60, 70])
    assert [server.metric(name) for name in names] == [before[0] + 3, before[1] + 5]
    assert server.metric("quire_request_queue_seconds_count") == queued + 1
    assert server.metric("quire_engine_steps_total") >= answer.usage.completion_tokens


def test_siblings_are_no_hits_of_the_cache(client: openai.OpenAI, server: Server) -> None:
    names = ("quire_prefix_query_tokens_total", "quire_prefix_hit_tokens_total")
    before = [server.metric(name) for name in names]
    salt = {"cache_salt": "siblings"}
    complete(client, n=4, prompt=[40] * 40, max_tokens=2, extra_body=salt)
    assert [server.metric(name) for name in names] == [before[0] + 40, before[1]]


def test_much_text_at_once(client: openai.OpenAI) -> None:
    prompts = [f"Story {i}: once upon a time there was a fox" for i in range(150)]
    answer = complete(client, prompt=prompts, max_tokens=2, echo=True)
    one = complete(client, prompt=prompts[77], max_tokens=2, echo=True)
    assert answer.choices[77].text == one.choices[0].text
    assert all(c.text.startswith(p) for c, p in zip(answer.choices, prompts, strict=True))


def test_verbosity_reaches_a_template_that_takes_it() -> None:
    engine = scripted_engine("ok")
    engine.tokenizer.use_template(
        "{% if verbosity is defined %}[{{ verbosity }}]{% endif %}{{ messages[0].content }}"
    )
    with serve(engine) as served:
        for verbosity in ("low", "medium"):
            served.openai().chat.completions.create(
                model=SCRIPTED, messages=[{"role": "user", "content": "Hi"}], verbosity=verbosity
            )
    heard = [engine.tokenizer.decode(prompt) for prompt, _ in engine.seen]
    assert heard == ["[low]Hi", "Hi"]
