"""`/tokenize` and `/detokenize` on a real server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.text.tokenizer import Tokenizer
from tests.server.server_process import MODEL, Server

EMBEDDED = Path(quire.__file__).parent / "embedded" / "quire-tiny"
HELLO = [{"role": "user", "content": "Hello there!"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_path(EMBEDDED)


def post(server: Server, path: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"{server.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        return {"status": error.code, **json.load(error)}


@pytest.mark.parametrize("text", ["Once upon a time", "", "héllo 🦊\n", "word " * 1000])
def test_tokenize_and_detokenize_round_trip(
    server: Server, tokenizer: Tokenizer, text: str
) -> None:
    answer = post(server, "/tokenize", model=MODEL, prompt=text)
    assert answer["tokens"] == tokenizer.encode(text).tolist()
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 2048
    assert answer["token_strs"] is None
    assert post(server, "/detokenize", model=MODEL, tokens=answer["tokens"]) == {"prompt": text}


def test_strings(server: Server, tokenizer: Tokenizer) -> None:
    answer = post(server, "/tokenize", prompt="Once upon", return_token_strs=True)
    assert answer["token_strs"] == [tokenizer.hub.id_to_token(id) for id in answer["tokens"]]


def test_conversations(server: Server, tokenizer: Tokenizer) -> None:
    def expected(**options: Any) -> list[int]:
        text = tokenizer.apply_chat_template(HELLO, **options)
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).tolist()
        return ids

    answer = post(server, "/tokenize", messages=HELLO)
    assert answer["tokens"] == expected(add_generation_prompt=True)
    bare = post(server, "/tokenize", messages=HELLO, add_generation_prompt=False)
    assert bare["tokens"] == expected(add_generation_prompt=False)
    begun = [*HELLO, {"role": "assistant", "content": "I am"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    continued = post(server, "/tokenize", messages=begun, **options)
    text = post(server, "/detokenize", tokens=continued["tokens"])["prompt"]
    assert text.endswith("I am")
    assert "<|im_start|>" in text
    special = post(server, "/tokenize", messages=HELLO, add_special_tokens=True)
    assert special["tokens"] == answer["tokens"]  # this tokenizer adds none


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": HELLO}, "prompt"),
        ({"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"prompt": "x", "what": 1}, "what"),
        ({"prompt": ["x"]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "owl", "content": "x"}]}, "messages[0].role"),
        ({"messages": HELLO, "continue_final_message": True}, "continue_final_message"),
        ({"messages": HELLO, "chat_template_kwargs": {"odd": 1}}, "chat_template_kwargs"),
        ({"messages": HELLO, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ({"prompt": "x", "model": "gpt-x"}, "model"),
    ],
)
def test_errors_of_tokenize(server: Server, body: Any, param: str) -> None:
    answer = post(server, "/tokenize", **body)
    assert answer["status"] in (400, 404)
    assert answer["error"]["param"] == param


@pytest.mark.parametrize(
    ("tokens", "param"),
    [([1, 99999999], "tokens[1]"), ([-1], "tokens[0]"), ("x", "tokens"), ([1.5], "tokens[0]")],
)
def test_errors_of_detokenize(server: Server, tokens: Any, param: str) -> None:
    answer = post(server, "/detokenize", tokens=tokens)
    assert (answer["status"], answer["error"]["param"]) == (400, param)
