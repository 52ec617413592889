"""`/v1/embeddings` with the `openai` client against a real server process."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai.types import CreateEmbeddingResponse

import quire
from quire.text.tokenizer import Tokenizer
from tests.server.schema import conforms
from tests.server.server_process import MODEL, Server

EMBEDDED = Path(quire.__file__).parent / "embedded" / "quire-tiny"
TEXTS = ["The fox sleeps.", "A dog barks at night.", "Once upon a time there was a king."]


def embed(client: openai.OpenAI, input: Any, **options: Any) -> Any:
    return client.embeddings.create(model=MODEL, input=input, **options)


def vectors(answer: Any) -> Any:
    return np.array([item.embedding for item in answer.data])


@pytest.fixture(scope="module")
def oracle() -> Callable[[str, str], Any]:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    model = transformers.AutoModel.from_pretrained(EMBEDDED, dtype=torch.float32)
    tokenizer = Tokenizer.from_path(EMBEDDED)

    def pooled(text: str, pooling: str) -> Any:
        with torch.inference_mode():
            ids = torch.tensor([tokenizer.encode(text).tolist()])
            states = model(ids).last_hidden_state[0]
        vector = states[-1] if pooling == "last" else states.mean(dim=0)
        return (vector / vector.norm()).numpy()

    return pooled


def test_texts(client: openai.OpenAI, oracle: Callable[[str, str], Any]) -> None:
    answer = embed(client, TEXTS)
    assert answer.model == MODEL
    assert [item.index for item in answer.data] == [0, 1, 2]
    expected = np.stack([oracle(text, "last") for text in TEXTS])
    assert np.abs(vectors(answer) - expected).max() < 1e-4
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 10
    one = embed(client, TEXTS[0], user="me")
    assert np.abs(vectors(one)[0] - expected[0]).max() < 1e-4


def test_mean(launch: Callable[..., Server], oracle: Callable[[str, str], Any]) -> None:
    server = launch("--pooling", "mean", "--max-num-batched-tokens", "16")
    text = " ".join(TEXTS * 4)
    found = vectors(embed(server.client(), [text, TEXTS[0], text]))
    assert np.abs(found[0] - oracle(text, "mean")).max() < 1e-4
    assert np.abs(found[2] - found[0]).max() < 1e-5
    assert np.abs(found[1] - oracle(TEXTS[0], "mean")).max() < 1e-4


def test_token_ids(client: openai.OpenAI) -> None:
    ids = [Tokenizer.from_path(EMBEDDED).encode(text).tolist() for text in TEXTS]
    by_text = vectors(embed(client, TEXTS))
    assert np.abs(vectors(embed(client, ids)) - by_text).max() < 1e-5
    assert np.abs(vectors(embed(client, ids[1]))[0] - by_text[1]).max() < 1e-5
    mixed = vectors(embed(client, [TEXTS[0], ids[1]]))
    assert np.abs(mixed - by_text[:2]).max() < 1e-5


def test_encodings(client: openai.OpenAI, server: Server) -> None:
    as_numbers = vectors(embed(client, TEXTS, encoding_format="float"))
    as_text = embed(client, TEXTS, encoding_format="base64")
    assert isinstance(as_text.data[0].embedding, str)
    assert np.abs(as_numbers - vectors(embed(client, TEXTS))).max() < 1e-6
    body = json.dumps({"input": "a", "model": MODEL}).encode()
    request = urllib.request.Request(
        f"{server.url}/v1/embeddings", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        conforms(CreateEmbeddingResponse, json.load(response))


def test_many_inputs_while_an_answer_streams(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="Once", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    next(chunks)
    inputs = [[10 + i % 500, 20, 30 + i % 7] for i in range(300)]
    answer = embed(client, inputs)
    assert len(answer.data) == 300
    assert answer.usage.prompt_tokens == 900
    again = vectors(embed(client, inputs[:2]))
    assert np.abs(vectors(answer)[:2] - again).max() < 1e-4
    assert list(chunks)[-1].choices[0].finish_reason == "length"


def test_dimensions(client: openai.OpenAI) -> None:
    size = len(embed(client, "a").data[0].embedding)
    assert len(embed(client, "a", dimensions=size).data[0].embedding) == size
    with pytest.raises(openai.BadRequestError, match="dimensions") as error:
        embed(client, "a", dimensions=size // 2)
    assert error.value.param == "dimensions"


def test_a_conversation(client: openai.OpenAI, server: Server) -> None:
    messages: list[Any] = [{"role": "user", "content": "A fox."}]
    for begun in (False, True):
        shape = {"messages": messages, "add_generation_prompt": begun}
        ids = httpx.post(f"{server.url}/tokenize", json=shape).json()["tokens"]
        for path in ("/v1/embeddings", "/pooling"):
            answer = httpx.post(server.url + path, json=shape).json()
            found = answer["data"][0].get("embedding") or answer["data"][0]["data"]
            assert np.abs(vectors(embed(client, ids))[0] - found).max() < 1e-5
            assert answer["usage"]["prompt_tokens"] == len(ids)
    for wrong, param in (
        ({"messages": messages, "input": "a"}, "messages"),
        ({"input": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({}, "input"),
        ({"messages": []}, "messages"),
    ):
        refused = httpx.post(f"{server.url}/v1/embeddings", json=wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_no_model_has_classes(server: Server) -> None:
    refused = httpx.post(f"{server.url}/classify", json={"input": "a"})
    assert refused.status_code == 404
    assert "classification head" in refused.json()["error"]["message"]


def test_metrics(client: openai.OpenAI, server: Server) -> None:
    names = ("quire_prompt_tokens_total", "quire_request_queue_seconds_count")
    before = [server.metric(name) for name in names]
    generated = server.metric("quire_engine_generation_tokens_total")
    embed(client, [[5, 6, 7], [8]])
    assert [server.metric(name) for name in names] == [before[0] + 4, before[1] + 2]
    assert server.metric("quire_engine_generation_tokens_total") == generated
    server.wait_for(lambda: server.metric("quire_requests_running") == 0, "the requests to end")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [5, 2_000_000]}, "input"),
        ({"input": [100] * 3000}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "extra_body": {"nonsense": 1}}, "nonsense"),
        ({"input": "a", "extra_body": {"priority": 1}}, "priority"),
    ],
)
def test_errors(client: openai.OpenAI, options: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.embeddings.create(model=MODEL, **options)
    assert error.value.param == param


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="gpt-x", input="a")


def test_much_text_at_once(client: openai.OpenAI) -> None:
    texts = [f"{TEXTS[i % 3]} {i}" for i in range(400)]
    found = vectors(embed(client, texts))
    assert found.shape[0] == 400
    assert np.abs(found[[5, 390]] - vectors(embed(client, [texts[5], texts[390]]))).max() < 1e-4
    with pytest.raises(openai.BadRequestError) as error:
        embed(client, [*texts, ""])
    assert error.value.param == "input"
