"""Routes of servers that run an encoder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from quire.cli.serve import sample_request
from quire.llm import LLM
from tests.features.pooling.encoders import SETTINGS, change_config, encoder
from tests.server.server_process import Server, start_server

TEXTS = ["the fox sleeps", "a dog barks at night", "once upon a time there was a king"]
QUERY = "a fox sleeps at night"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = {}
    for case in ("bert", "bert-score", "bert-classes"):
        folder = tmp_path_factory.mktemp(case)
        found[case] = folder, *encoder(folder, case)
    change_config(found["bert-classes"][0], id2label={"0": "bad", "1": "fair", "2": "good"})
    return found


def served(folder: Path) -> Iterator[Server]:
    running = start_server(str(folder))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def embedder(folders: dict[str, Any]) -> Iterator[Server]:
    yield from served(folders["bert"][0])


@pytest.fixture(scope="module")
def reranker(folders: dict[str, Any]) -> Iterator[Server]:
    yield from served(folders["bert-score"][0])


@pytest.fixture(scope="module")
def classifier(folders: dict[str, Any]) -> Iterator[Server]:
    yield from served(folders["bert-classes"][0])


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


def ask(server: Server, path: str, **body: Any) -> Any:
    answer = post(server, path, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def logits(model: Any, hub: Any, *texts: str) -> Any:
    tokens = hub.encode(*texts)
    with torch.inference_mode():
        return model(
            torch.tensor([tokens.ids]), token_type_ids=torch.tensor([tokens.type_ids])
        ).logits[0]


def test_embeddings(embedder: Server, folders: dict[str, Any]) -> None:
    _, model, hub = folders["bert"]
    answer = embedder.client().embeddings.create(model="tiny", input=TEXTS)
    for own, text in zip(answer.data, TEXTS, strict=True):
        with torch.inference_mode():
            states = model(torch.tensor([hub.encode(text).ids])).last_hidden_state[0].mean(0)
        wanted = states / states.norm()
        np.testing.assert_allclose(own.embedding, wanted, atol=1e-5, rtol=0)
    first = ask(embedder, "/pooling", input=TEXTS[0], pooling="cls")["data"][0]["data"]
    assert np.abs(np.array(first) - answer.data[0].embedding).max() > 1e-3


def test_long_texts(embedder: Server) -> None:
    text = "fox " * 200
    refused = post(embedder, "/v1/embeddings", input=text)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    for most, count in ((-1, 130), (10, 10)):
        cut = ask(embedder, "/v1/embeddings", input=text, truncate_prompt_tokens=most)
        assert cut["usage"]["prompt_tokens"] == count
    cut = ask(embedder, "/pooling", input=text, truncate_prompt_tokens=10)["data"][0]["data"]
    own = ask(embedder, "/pooling", input="fox " * 8)["data"][0]["data"]
    np.testing.assert_allclose(cut, own, atol=1e-6)


def test_what_an_embedder_refuses(embedder: Server) -> None:
    answer = post(embedder, "/v1/completions", prompt="fox", max_tokens=3)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "model_generates_nothing"
    messages = [{"role": "user", "content": "fox"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/responses", {"input": "fox"}),
        ("/v1/messages", {"model": "tiny", "messages": messages, "max_tokens": 3}),
        ("/generate", {"prompt": "fox"}),
    ):
        answer = post(embedder, path, **body)
        assert answer.status_code == 400, path
        assert "is an encoder and generates no text" in answer.text, path
    assert post(embedder, "/classify", input="fox").status_code == 404
    answer = post(embedder, "/v1/embeddings", input="fox", prompt_name="query")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_name")


def test_scores_and_ranks(reranker: Server, folders: dict[str, Any]) -> None:
    _, model, hub = folders["bert-score"]
    wanted = [float(logits(model, hub, QUERY, text).sigmoid()) for text in TEXTS]
    answer = ask(reranker, "/score", text_1=QUERY, text_2=TEXTS)
    assert [each["score"] for each in answer["data"]] == pytest.approx(wanted, abs=1e-5)
    tokens = sum(len(hub.encode(QUERY, text).ids) for text in TEXTS)
    assert answer["usage"]["prompt_tokens"] == tokens
    ranked = ask(reranker, "/v2/rerank", query=QUERY, documents=TEXTS, top_n=2)["results"]
    order = sorted(range(3), key=lambda place: -wanted[place])[:2]
    assert [each["index"] for each in ranked] == order
    assert ranked[0]["relevance_score"] == pytest.approx(max(wanted), abs=1e-5)
    refused = post(reranker, "/v1/embeddings", input="fox")
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "model_gives_no_vectors"


def test_long_pairs(reranker: Server, folders: dict[str, Any]) -> None:
    _, model, hub = folders["bert-score"]
    long = "dog " * 300
    refused = post(reranker, "/rerank", query=QUERY, documents=[long])
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    (own,) = ask(reranker, "/rerank", query=QUERY, documents=[long],
                 truncate_prompt_tokens=-1)["results"]  # fmt: skip
    hub.enable_truncation(130)
    wanted = float(logits(model, hub, QUERY, long).sigmoid())
    hub.no_truncation()
    assert own["relevance_score"] == pytest.approx(wanted, abs=1e-5)


def test_classes(classifier: Server, folders: dict[str, Any]) -> None:
    _, model, hub = folders["bert-classes"]
    answer = ask(classifier, "/classify", input=TEXTS)
    for own, text in zip(answer["data"], TEXTS, strict=True):
        wanted = logits(model, hub, text)
        assert own["probs"] == pytest.approx(wanted.softmax(0).tolist(), abs=1e-5)
        assert own["label"] == ["bad", "fair", "good"][int(wanted.argmax())]
        assert own["num_classes"] == 3
    raw = ask(classifier, "/classify", input=TEXTS[0], use_activation=False)["data"][0]["probs"]
    assert raw == pytest.approx(logits(model, hub, TEXTS[0]).tolist(), abs=1e-5)
    refused = post(classifier, "/score", text_1=QUERY, text_2=TEXTS)
    assert refused.json()["error"]["code"] == "model_gives_no_scores"
    assert post(classifier, "/classify").json()["error"]["param"] == "input"
    assert classifier.metric('quire_requests_finished_total{reason="stop"}') >= 4


def test_the_request_that_the_command_shows(
    embedder: Server, reranker: Server, classifier: Server, folders: dict[str, Any]
) -> None:
    for case, server in zip(folders, (embedder, reranker, classifier), strict=True):
        path, body = sample_request(LLM(str(folders[case][0]), **SETTINGS).config)
        assert f"{server.url}{path}" in "".join(server.output)
        ask(server, path, **body)
