"""vLLM's fields about tokens, with the official client on a real server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import quire
from quire.text.tokenizer import Tokenizer
from tests.server.server_process import MODEL

PROMPT = "Once upon a time"
HELLO: list[Any] = [{"role": "user", "content": "Hello there!"}]
BEGUN: list[Any] = [*HELLO, {"role": "assistant", "content": "I am"}]
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_path(Path(quire.__file__).parent / "embedded" / "quire-tiny")


def complete(client: openai.OpenAI, extra: dict[str, Any], **fields: Any) -> Any:
    given = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0.0, **fields}
    return client.completions.create(extra_body=extra, **given)


def chat(client: openai.OpenAI, extra: dict[str, Any], **fields: Any) -> Any:
    given = {"model": MODEL, "messages": HELLO, "max_tokens": 8, "temperature": 0.0, **fields}
    return client.chat.completions.create(extra_body=extra, **given)


def refused(asked: Any, client: openai.OpenAI, extra: dict[str, Any], **fields: Any) -> str:
    with pytest.raises(openai.BadRequestError) as caught:
        asked(client, extra, **fields)
    param: str = caught.value.body["param"]  # type: ignore[index]
    return param


def test_bad_words(client: openai.OpenAI) -> None:
    text = complete(client, {}).choices[0].text
    words = text.split()[:4]
    found = complete(client, {"bad_words": words}).choices[0].text
    assert found
    assert not set(words) & set(found.split())
    assert complete(client, {"bad_words": []}).choices[0].text == text
    answer = chat(client, {"bad_words": words}, max_tokens=24).choices[0].message.content
    assert not set(words) & set(answer.split())


def test_allowed_token_ids(client: openai.OpenAI) -> None:
    extra = {"allowed_token_ids": [70, 71], "return_token_ids": True, "ignore_eos": True}
    answer = complete(client, extra).choices[0]
    assert len(answer.token_ids) == 24
    assert set(answer.token_ids) <= {70, 71}
    assert set(chat(client, extra).choices[0].token_ids) <= {70, 71}


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": "word"}, "bad_words"),
        ({"bad_words": ["a"] * 129}, "bad_words"),
        ({"bad_words": ["x" * 257]}, "bad_words[0]"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": [10**7]}, "allowed_token_ids"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": ""}, "request_id"),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        ({"beam_width": 2}, "beam_width"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ],
)
def test_refused(client: openai.OpenAI, extra: dict[str, Any], param: str) -> None:
    assert refused(complete, client, extra) == param
    assert refused(chat, client, extra) == param


def test_a_whole_vocabulary_of_logprobs(client: openai.OpenAI) -> None:
    assert refused(complete, client, {"logprobs": -1}) == "logprobs"
    assert refused(chat, client, {"top_logprobs": -1}, logprobs=True) == "top_logprobs"


def test_truncated_prompts(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT).tolist()
    extra = {"truncate_prompt_tokens": 2, "return_token_ids": True}
    for prompt in (PROMPT, ids):
        assert complete(client, extra, prompt=prompt).choices[0].prompt_token_ids == ids[-2:]
    whole = {"truncate_prompt_tokens": -1, "return_token_ids": True}
    assert complete(client, whole).choices[0].prompt_token_ids == ids
    long = complete(client, whole, prompt="word " * 3000, max_tokens=5)
    assert long.usage.prompt_tokens == 2043
    assert long.usage.completion_tokens <= 5
    answer = chat(client, extra)
    assert answer.usage.prompt_tokens == 2
    much = [{"role": "user", "content": "word " * 3000}]
    assert chat(client, whole, messages=much).usage.prompt_tokens == 2040
    assert refused(complete, client, extra, echo=True) == "echo"
    assert refused(complete, client, extra, suffix="end") == "suffix"


def test_the_side_of_prompts_that_is_cut(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT).tolist()
    for side, want in (("left", ids[-2:]), ("right", ids[:2])):
        extra = {
            "truncate_prompt_tokens": 2, "truncation_side": side, "return_token_ids": True
        }  # fmt: skip
        assert complete(client, extra).choices[0].prompt_token_ids == want
        whole = chat(client, {"return_token_ids": True}).prompt_token_ids
        kept = whole[-2:] if side == "left" else whole[:2]
        assert chat(client, extra).prompt_token_ids == kept
    assert refused(complete, client, {"truncation_side": "left"}) == "truncation_side"


def test_usage_in_every_chunk_and_at_the_end(client: openai.OpenAI) -> None:
    options: Any = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    chunks = list(chat(client, {}, **options))
    assert all(chunk.usage is not None for chunk in chunks)
    assert chunks[-1].choices == []
    options["stream_options"]["include_usage"] = False
    field = "stream_options.continuous_usage_stats"
    assert refused(chat, client, {}, **options) == field


def test_tokenizer_info(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    info = httpx.get(str(client.base_url).replace("/v1/", "/tokenizer_info")).json()
    assert info["chat_template"] in tokenizer.chat_templates.values()
    assert info["eos_token"] == tokenizer.special_tokens["eos_token"]


def test_special_tokens(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    for special in (True, False):
        extra = {"add_special_tokens": special, "return_token_ids": True}
        ids = tokenizer.encode(PROMPT, add_special_tokens=special).tolist()
        assert complete(client, extra).choices[0].prompt_token_ids == ids
        assert chat(client, extra).usage.prompt_tokens == chat(client, {}).usage.prompt_tokens
        assert refused(complete, client, extra, suffix="end") == "suffix"


def test_request_id(client: openai.OpenAI) -> None:
    extra = {"request_id": "mine-1"}
    assert complete(client, extra).id == "cmpl-mine-1"
    assert chat(client, extra).id == "chatcmpl-mine-1"
    assert {chunk.id for chunk in chat(client, extra, stream=True)} == {"chatcmpl-mine-1"}
    assert refused(chat, client, extra, store=True) == "request_id"


def test_tokens_as_ids(client: openai.OpenAI) -> None:
    extra = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = complete(client, extra, logprobs=2).choices[0]
    assert choice.logprobs.tokens == [f"token_id:{id}" for id in choice.token_ids]
    assert all(len(top) >= 2 for top in choice.logprobs.top_logprobs)
    assert all(name.startswith("token_id:") for top in choice.logprobs.top_logprobs for name in top)
    said = chat(client, extra, logprobs=True, top_logprobs=2).choices[0]
    assert [e.token for e in said.logprobs.content] == [f"token_id:{id}" for id in said.token_ids]
    assert all(t.token.startswith("token_id:") for t in said.logprobs.content[0].top_logprobs)


def test_echo_in_chat(client: openai.OpenAI) -> None:
    rest = chat(client, CONTINUED, messages=BEGUN).choices[0].message.content
    echo = {**CONTINUED, "echo": True}
    assert chat(client, echo, messages=BEGUN).choices[0].message.content == f"I am{rest}"
    chunks = chat(client, echo, messages=BEGUN, stream=True, n=2, temperature=0.0)
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [f"I am{rest}"] * 2
    stored = chat(client, echo, messages=BEGUN, store=True, stream=True)
    id = [chunk.id for chunk in stored][-1]
    kept = json.loads(client.chat.completions.with_raw_response.retrieve(id).text)
    assert kept["choices"][0]["message"]["content"] == f"I am{rest}"
    assert refused(chat, client, {"echo": True}) == "echo"


def test_samplers(client: openai.OpenAI) -> None:
    loop = "The cat sat. The cat sat. The cat sat. The cat"
    few = {"max_tokens": 6}
    greedy = complete(client, {}, prompt=loop, **few).choices[0].text
    dry = {"dry_multiplier": 30.0, "dry_allowed_length": 1, "dry_sequence_breakers": []}
    assert complete(client, dry, prompt=loop, **few).choices[0].text != greedy
    drawn = {"seed": 5, "temperature": 1.0, **few}
    plain = complete(client, {}, **drawn).choices[0].text
    assert (
        complete(client, {"xtc_probability": 0.0, "typical_p": 1.0}, **drawn).choices[0].text
        == plain
    )
    xtc = {"xtc_probability": 1.0, "xtc_threshold": 0.02}
    assert complete(client, xtc, **drawn).choices[0].text != plain
    assert chat(client, {"typical_p": 0.5, **xtc}, **drawn).choices[0].message.content


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"typical_p": 0.0}, "typical_p"),
        ({"xtc_probability": 2.0}, "xtc_probability"),
        ({"xtc_threshold": "x"}, "xtc_threshold"),
        ({"dry_multiplier": -1.0}, "dry_multiplier"),
        ({"dry_base": 0.1}, "dry_base"),
        ({"dry_allowed_length": 0}, "dry_allowed_length"),
        ({"dry_penalty_last_n": -2}, "dry_penalty_last_n"),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers[0]"),
        ({"dry_sequence_breakers": ["a"] * 65}, "dry_sequence_breakers"),
        ({"logits_processors": []}, "logits_processors"),
    ],
)
def test_samplers_are_checked(client: openai.OpenAI, extra: dict[str, Any], param: str) -> None:
    assert refused(complete, client, extra) == param
