"""Fields for trainers: how tokens were drawn, and their experts."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import openai
import pytest

from quire.engine.loop.output import CompletionUpdate
from quire.server.apis.openai.objects import UNSET, routed_experts_of
from tests.server.server_process import MODEL, Server

DRAWN: dict[str, Any] = {"temperature": 0.7, "top_p": 1.0, "max_tokens": 6, "seed": 3}
FIELDS = {
    "top_k": 4,
    "min_p": 0.0,
    "return_sampling_info": True,
    "return_token_ids": True,
    "ignore_eos": True,
}


def post(server: Server, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{server.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def check(info: Any) -> None:
    assert info["mask_sizes"] == [4] * 6
    assert all(
        processed >= raw
        for raw, processed in zip(info["raw_logprobs"], info["processed_logprobs"], strict=True)
    )


def test_sampling_info(server: Server, client: openai.OpenAI) -> None:
    text = {"model": MODEL, "prompt": "Once upon", **DRAWN, **FIELDS}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **DRAWN, **FIELDS}
    status, answer = post(server, "/v1/completions", {**text, "n": 2})
    assert status == 200, answer
    for choice in answer["choices"]:
        check(choice["sampling_info"])
        assert "routed_experts" not in choice
    _, answer = post(server, "/v1/chat/completions", chat)
    check(answer["choices"][0]["sampling_info"])
    _, answer = post(server, "/generate", text)
    check(answer["sampling_info"])
    _, answer = post(server, "/v1/completions", {**text, "max_tokens": 0, "echo": True})
    assert answer["choices"][0]["sampling_info"]["mask_sizes"] == []
    # In streams the last chunk of a choice has all of its tokens.
    chunks = list(
        client.completions.create(
            model=MODEL, prompt="Once upon", stream=True, extra_body=FIELDS, **DRAWN
        )
    )
    infos = [getattr(chunk.choices[0], "sampling_info", None) for chunk in chunks]
    assert infos[:-1] == [None] * (len(chunks) - 1)
    check(infos[-1])
    talk: Any = [{"role": "user", "content": "Hi"}]
    deltas = list(
        client.chat.completions.create(
            model=MODEL, messages=talk, stream=True, extra_body=FIELDS, **DRAWN
        )
    )
    infos = [getattr(each.choices[0], "sampling_info", None) for each in deltas]
    assert [info is not None for info in infos].count(True) == 1
    check(infos[-1])


def test_logprobs_mode(client: openai.OpenAI) -> None:
    answers = [
        client.completions.create(
            model=MODEL, prompt="Once upon", logprobs=2,
            extra_body={"top_k": 2, "min_p": 0.0, "logprobs_mode": mode}, **DRAWN,
        )
        for mode in ("raw_logprobs", "processed_logprobs")
    ]  # fmt: skip
    raw, processed = (answer.choices[0].logprobs for answer in answers)
    assert raw.tokens == processed.tokens
    for before, after in zip(raw.top_logprobs, processed.top_logprobs, strict=True):
        assert sum(np.exp(list(after.values()))) == pytest.approx(1.0, abs=1e-4)
        assert sum(np.exp(list(before.values()))) < 1.0


@pytest.mark.parametrize(("path", "fields", "param"), [
    ("/v1/completions", {"return_routed_experts": True}, "return_routed_experts"),
    ("/v1/completions", {"logprobs_mode": "other"}, "logprobs_mode"),
    ("/v1/completions", {"return_sampling_info": True, "logprobs_mode": "raw_logits"},
     "logprobs_mode"),
    ("/v1/completions", {"best_of": 2, "logprobs_mode": "raw_logits"}, "best_of"),
    ("/v1/completions", {"return_sampling_info": True, "use_beam_search": True, "n": 2},
     "return_sampling_info"),
    ("/generate", {"return_sampling_info": True, "stream": True}, "return_sampling_info"),
])  # fmt: skip
def test_refusals(server: Server, path: str, fields: dict[str, Any], param: str) -> None:
    status, answer = post(server, path, {"model": MODEL, "prompt": "Hi", **fields})
    assert status == 400, answer
    assert answer["error"]["param"] == param


def test_experts_are_encoded() -> None:
    experts = np.arange(12, dtype=np.int16).reshape(2, 3, 2)
    found = routed_experts_of(CompletionUpdate(0, routed_experts=experts))
    assert found is not UNSET
    data = np.frombuffer(base64.b64decode(found.data), found.dtype).reshape(found.shape)
    np.testing.assert_array_equal(data, experts)
    assert routed_experts_of(CompletionUpdate(0)) is UNSET
    assert routed_experts_of(None) is UNSET
