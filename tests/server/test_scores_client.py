"""`/pooling`, `/score` and `/rerank` on a real server; reranking with Cohere's client."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import openai
import pytest

from quire.errors import ModelError
from quire.models.config import spec_from_config
from tests.server.server_process import MODEL, Server

TEXTS = ["The fox sleeps.", "A dog barks at night.", "Once upon a time there was a king."]
QUERY = "A fox is asleep."


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


def ask(server: Server, path: str, **body: Any) -> Any:
    answer = post(server, path, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def cosines(server: Server) -> Any:
    """Returns the similarity of each text to the query, from embeddings of the official client."""
    found = server.client().embeddings.create(model=MODEL, input=[QUERY, *TEXTS])
    vectors = np.array([item.embedding for item in found.data])
    return vectors[1:] @ vectors[0]


def test_pooling(server: Server, client: openai.OpenAI) -> None:
    answer = ask(server, "/pooling", model=MODEL, input=TEXTS)
    assert (answer["object"], answer["model"]) == ("list", MODEL)
    assert [item["object"] for item in answer["data"]] == ["pooling"] * 3
    found = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    for mine, theirs in zip(answer["data"], found.data, strict=True):
        assert np.allclose(mine["data"], theirs.embedding, atol=1e-5)
    assert answer["usage"]["prompt_tokens"] == found.usage.prompt_tokens
    plain = ask(server, "/pooling", input=TEXTS[0], normalize=False)["data"][0]["data"]
    assert np.linalg.norm(plain) > 1.5
    assert np.allclose(plain / np.linalg.norm(plain), found.data[0].embedding, atol=1e-5)
    mean = ask(server, "/pooling", input=TEXTS[0], pooling="mean")["data"][0]["data"]
    assert np.abs(np.array(mean) - found.data[0].embedding).max() > 1e-3
    as_text = ask(server, "/pooling", input="a", encoding_format="base64")["data"][0]["data"]
    assert isinstance(as_text, str)


def test_one_text_to_many(server: Server, cosines: Any) -> None:
    for path in ("/score", "/v1/score"):
        answer = ask(server, path, model=MODEL, text_1=QUERY, text_2=TEXTS)
        assert [item["index"] for item in answer["data"]] == [0, 1, 2]
        assert np.allclose([item["score"] for item in answer["data"]], cosines, atol=1e-5)
    one = ask(server, "/score", text_1=QUERY, text_2=TEXTS[1])
    assert one["data"][0]["score"] == pytest.approx(cosines[1], abs=1e-5)
    assert one["usage"]["total_tokens"] < answer["usage"]["total_tokens"]


def test_pairs(server: Server, cosines: Any) -> None:
    answer = ask(server, "/score", text_1=[QUERY, TEXTS[0]], text_2=[TEXTS[2], TEXTS[0]])
    scores = [item["score"] for item in answer["data"]]
    assert scores == pytest.approx([cosines[2], 1.0], abs=1e-5)


@pytest.mark.parametrize(
    ("one", "other"), [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_other_names_of_the_two_sides(server: Server, cosines: Any, one: str, other: str) -> None:
    answer = ask(server, "/score", **{one: QUERY, other: TEXTS})
    assert [item["score"] for item in answer["data"]] == pytest.approx(cosines, abs=1e-5)
    refused = post(server, "/score", **{one: ["a", "b"], other: ["a"]})
    assert refused.json()["error"]["param"] == one
    assert f"'{other}' 1" in refused.json()["error"]["message"]


def test_rerank(server: Server, cosines: Any) -> None:
    order = np.argsort(-cosines).tolist()
    documents = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]
    answer = ask(server, "/rerank", model=MODEL, query=QUERY, documents=documents)
    assert [item["index"] for item in answer["results"]] == order
    assert [item["document"]["text"] for item in answer["results"]] == [TEXTS[i] for i in order]
    scores = [item["relevance_score"] for item in answer["results"]]
    assert np.allclose(scores, cosines[order], atol=1e-5)
    best = ask(server, "/v1/rerank", query=QUERY, documents=TEXTS, top_n=1, return_documents=False)[
        "results"
    ]
    assert len(best) == 1
    assert set(best[0]) == {"index", "relevance_score"}
    assert len(ask(server, "/rerank", query=QUERY, documents=TEXTS, top_n=0)["results"]) == 3


def test_coheres_clients(server: Server, cosines: Any) -> None:
    cohere = pytest.importorskip("cohere")
    order = np.argsort(-cosines).tolist()
    for kind in (cohere.Client, cohere.ClientV2):
        client = kind(api_key="none", base_url=server.url)
        answer = client.rerank(model=MODEL, query=QUERY, documents=TEXTS, top_n=2)
        assert [item.index for item in answer.results] == order[:2]
        assert answer.results[0].relevance_score == pytest.approx(cosines[order[0]], abs=1e-5)


def test_the_last_tokens_are_kept(server: Server) -> None:
    long = "word " * 3000 + TEXTS[0]
    assert post(server, "/rerank", query=QUERY, documents=[long]).status_code == 400
    answer = ask(
        server, "/rerank", query=QUERY, documents=[long, TEXTS[0]], truncate_prompt_tokens=-1
    )
    assert answer["usage"]["prompt_tokens"] > 2000
    few = ask(server, "/score", text_1=long, text_2=TEXTS[0], truncate_prompt_tokens=3)
    assert few["data"][0]["score"] == pytest.approx(1.0, abs=1e-5)
    assert few["usage"]["prompt_tokens"] == 6


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/pooling", {"input": "a", "pooling": "cls"}, "pooling"),
        ("/pooling", {"input": "a", "normalize": 1}, "normalize"),
        ("/pooling", {"input": "a", "dimensions": 3}, "dimensions"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {}, "text_1"),
        ("/score", {"queries": "a"}, "documents"),
        ("/score", {"items": "a"}, "queries"),
        ("/score", {"text_1": "a", "documents": "b"}, "documents"),
        ("/score", {"queries": "a", "documents": "b", "items": "c"}, "items"),
        ("/score", {"queries": "a", "documents": ["a", ""]}, "documents"),
        ("/score", {"text_1": [], "text_2": "a"}, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": ["a", ""]}, "text_2"),
        ("/score", {"text_1": "a", "text_2": ["a"] * 2048}, "text_2"),
        ("/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 0},
         "truncate_prompt_tokens"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["a"] * 2048}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["t"]}, "rank_fields"),
        ("/rerank", {"query": "a", "documents": ["b"], "priority": 1}, "priority"),
    ],
)  # fmt: skip
def test_errors(server: Server, path: str, body: dict[str, Any], param: str) -> None:
    answer = post(server, path, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_documents_of_a_wrong_shape(server: Server) -> None:
    answer = post(server, "/rerank", query="a", documents=["b", {"title": "c"}])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("documents[1]")


def test_cross_encoders_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="Qwen3ForSequenceClassification"):
        spec_from_config({"architectures": ["Qwen3ForSequenceClassification"]})
