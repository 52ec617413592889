"""The `openai` client against a real server process."""

from __future__ import annotations

import json
import threading
import urllib.request
from typing import Any

import openai
import pytest

from tests.server.server_process import MODEL, Server

HELLO: list[Any] = [{"role": "user", "content": "Hello! Who are you?"}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


def chat(client: openai.OpenAI, **options: Any) -> Any:
    extra = {"ignore_eos": True, **options.pop("extra_body", {})}
    arguments = {**GREEDY, "messages": HELLO, "max_tokens": 12, "extra_body": extra, **options}
    return client.chat.completions.create(**arguments)


def complete(client: openai.OpenAI, **options: Any) -> Any:
    extra = {"ignore_eos": True, **options.pop("extra_body", {})}
    prompt = "Once upon a time"
    arguments = {**GREEDY, "prompt": prompt, "max_tokens": 12, "extra_body": extra, **options}
    return client.completions.create(**arguments)


def test_chat(client: openai.OpenAI) -> None:
    answer = chat(client)
    choice = answer.choices[0]
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def test_streamed_chat_is_the_same_text(client: openai.OpenAI) -> None:
    whole = chat(client).choices[0].message.content
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    assert len([c for c in chunks if c.choices]) > 2


def test_usage_only_when_asked(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True))
    assert all(chunk.choices and "usage" not in chunk.model_fields_set for chunk in chunks)


def test_completion_of_text_and_of_ids(client: openai.OpenAI) -> None:
    answer = complete(client, extra_body={"return_token_ids": True})
    choice = answer.choices[0]
    assert answer.object == "text_completion"
    assert choice.text
    assert choice.logprobs is None
    again = complete(client, prompt=choice.prompt_token_ids)
    assert again.choices[0].text == choice.text
    assert again.usage.prompt_tokens == len(choice.prompt_token_ids)


def test_several_prompts_times_n(client: openai.OpenAI) -> None:
    one, two = (complete(client, prompt=p).choices[0].text for p in ("The cat", "A big dog"))
    answer = complete(client, prompt=["The cat", "A big dog"], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [one, one, two, two]
    assert answer.usage.completion_tokens == 48
    texts = ["", "", "", ""]
    for chunk in complete(client, prompt=["The cat", "A big dog"], n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [one, one, two, two]


def test_n_samples_differ(client: openai.OpenAI) -> None:
    answer = chat(client, n=4, temperature=1.5, seed=3)
    assert len({choice.message.content for choice in answer.choices}) > 1


def test_seed(client: openai.OpenAI) -> None:
    texts = [
        complete(client, temperature=1.2, seed=seed, extra_body={"top_k": 0}).choices[0].text
        for seed in (7, 7, 8)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_stop_string(client: openai.OpenAI) -> None:
    text = complete(client, max_tokens=24).choices[0].text
    stop = text[len(text) // 2 :][:3]
    choice = complete(client, max_tokens=24, stop=[stop]).choices[0]
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == stop
    streamed = complete(client, max_tokens=24, stop=stop, stream=True)
    assert "".join(c.choices[0].text for c in streamed if c.choices) == choice.text
    kept = complete(
        client, max_tokens=24, stop=stop, extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == choice.text + stop


def test_stop_token_and_bias(client: openai.OpenAI) -> None:
    answer = complete(
        client, logit_bias={"500": 100}, max_tokens=3, extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].token_ids == [500, 500, 500]
    stopped = complete(client, logit_bias={"500": 100}, extra_body={"stop_token_ids": [500]})
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage.completion_tokens == 1
    late = complete(
        client, logit_bias={"500": 100}, extra_body={"stop_token_ids": [500], "min_tokens": 4}
    )
    assert late.usage.completion_tokens >= 4


def test_chat_streams_have_the_prompts_ids_once(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"n": 2, "extra_body": {"return_token_ids": True}}
    whole = chat(client, **asked)
    assert whole.prompt_token_ids
    chunks = list(chat(client, stream=True, **asked))
    for choice in whole.choices:
        assert not hasattr(choice, "prompt_token_ids")
        own = [chunk for chunk in chunks if chunk.choices[0].index == choice.index]
        told = [getattr(chunk, "prompt_token_ids", None) for chunk in own]
        assert told == [whole.prompt_token_ids, *[None] * (len(own) - 1)]


def test_chat_logprobs(client: openai.OpenAI) -> None:
    choice = chat(client, logprobs=True, top_logprobs=3).choices[0]
    content = choice.logprobs.content
    assert len(content) == 12
    for entry in content:
        assert entry.logprob <= 0
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedy
    joined = b"".join(bytes(entry.bytes) for entry in content).decode("utf-8", "replace")
    assert joined.startswith(choice.message.content.rstrip("\ufffd"))
    bare = chat(client, logprobs=True).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in bare] == [[]] * 12
    streamed = [
        entry
        for chunk in chat(client, logprobs=True, top_logprobs=3, stream=True)
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else ())
    ]
    assert [e.token for e in streamed] == [e.token for e in content]


def test_completion_logprobs(client: openai.OpenAI) -> None:
    choice = complete(client, logprobs=2).choices[0]
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == 12
    assert logprobs.text_offset[0] == 0
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    for token, value, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert top[token] == value
        assert 1 <= len(top) <= 3
    assert complete(client, logprobs=0).choices[0].logprobs.top_logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(client: openai.OpenAI, stream: bool) -> None:
    prompt = "Once upon a time"
    plain = complete(client, max_tokens=4).choices[0].text
    options = {"echo": True, "logprobs": 1, "max_tokens": 4, "stream": stream}
    answer = complete(client, **options)
    parts = [c.choices[0] for c in (answer if stream else [answer]) if c.choices]
    assert "".join(part.text for part in parts) == prompt + plain
    tokens = [token for part in parts for token in part.logprobs.tokens]
    values = [value for part in parts for value in part.logprobs.token_logprobs]
    offsets = [offset for part in parts for offset in part.logprobs.text_offset]
    tops = [top for part in parts for top in part.logprobs.top_logprobs]
    assert values[0] is None
    assert tops[0] is None
    assert all(value <= 0 for value in values[1:])
    assert "".join(tokens[:-4]) == prompt
    assert offsets[len(tokens) - 4] == len(prompt)


def test_scoring_a_prompt(client: openai.OpenAI) -> None:
    answer = complete(client, echo=True, logprobs=0, max_tokens=0)
    choice = answer.choices[0]
    assert choice.text == "Once upon a time"
    assert "".join(choice.logprobs.tokens) == choice.text
    assert answer.usage.completion_tokens == 0


def test_prompt_logprobs(client: openai.OpenAI) -> None:
    answer = complete(client, extra_body={"prompt_logprobs": 2})
    entries = answer.choices[0].prompt_logprobs
    assert len(entries) == answer.usage.prompt_tokens
    assert entries[0] is None
    assert all(2 <= len(entry) <= 3 for entry in entries[1:])


def test_cached_tokens(client: openai.OpenAI) -> None:
    prompt = "A very long tale that nobody has told before. " * 10
    first, second = (complete(client, prompt=prompt, max_tokens=1).usage for _ in range(2))
    assert first.prompt_tokens_details.cached_tokens < 32
    assert second.prompt_tokens_details.cached_tokens == second.prompt_tokens - 1
    salted = complete(client, prompt=prompt, max_tokens=1, extra_body={"cache_salt": "mine"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_continue_final_message(client: openai.OpenAI) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "I am"}]
    answer = chat(
        client,
        messages=begun,
        extra_body={"continue_final_message": True, "return_token_ids": True},
    )
    closed = chat(client, messages=begun, extra_body={"return_token_ids": True})
    ids = answer.prompt_token_ids
    assert closed.prompt_token_ids[: len(ids) - 1] == ids[:-1]
    assert len(closed.prompt_token_ids) > len(ids)


def test_parts_and_developer(client: openai.OpenAI) -> None:
    ids = [
        chat(client, messages=messages, extra_body={"return_token_ids": True}).prompt_token_ids
        for messages in (
            [{"role": "system", "content": "Be kind."}, *HELLO],
            [
                {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
                {"role": "user", "content": [{"type": "text", "text": HELLO[0]["content"]}]},
            ],
        )
    ]
    assert ids[0] == ids[1]


def test_too_long(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        complete(client, prompt=[100] * 5000)
    assert "5000" in str(error.value)
    assert "2048" in str(error.value)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="2048"):
        list(complete(client, prompt=[100] * 5000, stream=True))


def test_token_beyond_the_vocabulary(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        complete(client, prompt=[5, 2_000_000])
    assert "2000000" in str(error.value)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"extra_body": {"nonsense": 1}}, openai.BadRequestError, "nonsense"),
        ({"model": "gpt-x"}, openai.NotFoundError, "gpt-x"),
        ({"temperature": 1000}, openai.BadRequestError, "temperature"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]},
         openai.BadRequestError, "tools"),
        ({"top_logprobs": 2}, openai.BadRequestError, "top_logprobs"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, openai.BadRequestError, "max_tokens"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}},
         openai.BadRequestError, "chat_template_kwargs"),
    ],
)  # fmt: skip
def test_errors(client: openai.OpenAI, options: Any, kind: Any, text: str) -> None:
    with pytest.raises(kind) as error:
        chat(client, **options)
    assert text in str(error.value)


def test_models_and_health(server: Server, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).max_model_len == 2048  # type: ignore[attr-defined]
    with urllib.request.urlopen(f"{server.url}/health", timeout=10) as response:
        assert json.load(response) == {"status": "ok"}


def test_generate_streams_bare_text(server: Server) -> None:
    body = {"prompt": "Once", "temperature": 0, "max_tokens": 6, "ignore_eos": True}

    def post(**more: Any) -> bytes:
        request = urllib.request.Request(
            f"{server.url}/generate",
            json.dumps({**body, **more}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.read()

    answer = json.loads(post())
    assert answer["usage"]["completion_tokens"] == 6
    assert post(stream=True).decode() == answer["text"]


def test_second_request_while_the_first_streams(client: openai.OpenAI) -> None:
    first = iter(complete(client, max_tokens=100, stream=True))
    next(first)
    assert complete(client, prompt="Hi", max_tokens=4).usage.completion_tokens == 4
    rest = list(first)
    assert rest[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_frees_the_request(server: Server, stream: bool) -> None:
    client = server.client()
    server.wait_for(lambda: server.metric("quire_requests_running") == 0, "quiet")
    options = {"max_tokens": 2000, "stream": stream}
    before = server.metric("quire_generation_tokens_total")
    if stream:
        chunks = iter(complete(client, **options))
        next(chunks)
    else:
        request = threading.Thread(target=_ignore_failure, args=(client, options), daemon=True)
        request.start()
    server.wait_for(lambda: server.metric("quire_requests_running") == 1, "the request to run")
    client.close()
    if stream:
        chunks.close()  # type: ignore[attr-defined]
    server.wait_for(lambda: server.metric("quire_requests_running") == 0, "the request to end")
    server.wait_for(lambda: server.metric("quire_open_requests") == 0, "its task to end")
    assert server.metric("quire_generation_tokens_total") - before < 2000


def _ignore_failure(client: openai.OpenAI, options: dict[str, Any]) -> None:
    import contextlib

    with contextlib.suppress(Exception):
        complete(client.with_options(timeout=0.5), **options)


def test_many_at_once(server: Server) -> None:
    client = server.client()
    expected = complete(client, max_tokens=16).choices[0].text
    texts: list[str] = []

    def ask() -> None:
        texts.append(complete(client, max_tokens=16).choices[0].text)

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 16
    assert set(texts) == {expected}


def test_metrics(server: Server, client: openai.OpenAI) -> None:
    before = server.metric("quire_generation_tokens_total")
    complete(client, max_tokens=5)
    assert server.metric("quire_generation_tokens_total") == before + 5
    assert server.metric("quire_engine_up") == 1
    assert server.metric('quire_kv_blocks{group="0",state="free"}') > 0
    assert server.metric("quire_prefix_query_tokens_total") > 0
    assert server.metric("quire_time_to_first_token_seconds_count") > 0
