"""Ollama's own clients against a scripted engine.

`ollama-0.6.3-tests.jsonl` has each request that the tests of the Python client send, with the
names of these tests and the status that Quire answers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ollama
import pytest
from pydantic import BaseModel

from quire.engine.loop.embedding import Embedding
from quire.server.args import ServerArgs
from tests.server.scripted import MODEL, Scripted, Speaker, serve

RECORDED = [
    json.loads(line)
    for line in Path(__file__).with_name("ollama-0.6.3-tests.jsonl").read_text().splitlines()
]
ARGS = ServerArgs(
    generation_config="none", ollama_api=0, served_model_name=(MODEL, "dummy*", "qwen3.8:27b")
)
CALL = '<tool_call>{"name": "look", "arguments": {"city": "Oslo"}}</tool_call>'
HELLO = [{"role": "user", "content": "Hello."}]


class EmbeddingSpeaker(Speaker):
    async def vector(self, prompt: Any, **_: Any) -> Embedding:
        return Embedding(values=np.arange(64, dtype=np.float32), prompt_token_ids=[1, 2, 3])


@pytest.fixture(scope="module")
def running() -> Iterator[Scripted]:
    with serve(EmbeddingSpeaker(), ARGS) as scripted:
        yield scripted


@pytest.fixture
def engine(running: Scripted) -> Speaker:
    assert isinstance(running.engine, Speaker)
    running.engine.texts.clear()
    return running.engine


@pytest.fixture
def client(running: Scripted) -> ollama.Client:
    return ollama.Client(host=running.url)


def look(city: str) -> str:
    """Looks out of the window.

    Args:
        city: Where.
    """
    return f"Rain in {city}."


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: row["tests"][0])
def test_requests_of_its_own_tests(running: Scripted, engine: Speaker, row: Any) -> None:
    engine.say("Yes." if '"format":{' not in row["body"] else '{"answer": "x", "confidence": 1}')
    url = running.url + row["path"]
    answer = httpx.request(row["method"], url, content=row["body"])
    assert answer.status_code == row["status"], answer.text
    lines = answer.text.splitlines()
    assert lines
    for line in lines:
        found = json.loads(line)
        if answer.status_code != 200:
            assert found.keys() == {"error"}
        elif row["path"] == "/api/chat":
            ollama.ChatResponse.model_validate(found)
        elif row["path"] == "/api/generate":
            ollama.GenerateResponse.model_validate(found)
        else:
            assert ollama.ProgressResponse.model_validate(found).status == "success"


def test_chats(engine: Speaker, client: ollama.Client) -> None:
    engine.say("One two.", "One two.")
    whole = client.chat(model=MODEL, messages=HELLO)
    assert whole.message.content == "One two."
    parts = list(client.chat(model=MODEL, messages=HELLO, stream=True))
    assert "".join(part.message.content or "" for part in parts) == "One two."
    assert parts[-1].done_reason == "stop"
    assert parts[-1].eval_count == whole.eval_count


def test_functions_as_tools(engine: Speaker, client: ollama.Client) -> None:
    engine.say(CALL, "It rains.")
    messages: list[Any] = list(HELLO)
    answer = client.chat(model=MODEL, messages=messages, tools=[look])
    (call,) = answer.message.tool_calls or ()
    result = look(**call.function.arguments)
    messages += [answer.message, {"role": "tool", "content": result, "tool_name": "look"}]
    assert client.chat(model=MODEL, messages=messages, tools=[look]).message.content == "It rains."
    assert "Rain in Oslo." in engine.heard[-1]
    assert "Looks out of the window." in engine.heard[-1]


def test_structured_outputs(engine: Speaker, client: ollama.Client) -> None:
    class Pet(BaseModel):
        name: str

    engine.say('{"name": "Rex"}')
    answer = client.chat(model=MODEL, messages=HELLO, format=Pet.model_json_schema())
    assert Pet.model_validate_json(answer.message.content or "").name == "Rex"


def test_prompts_and_vectors(engine: Speaker, client: ollama.Client) -> None:
    engine.say("One.", "Two.")
    first = client.generate(model=MODEL, prompt="Hello.", logprobs=True, top_logprobs=0)
    assert first.response == "One."
    assert client.generate(model=MODEL, prompt="More.", context=first.context).response == "Two."
    assert len(client.embed(model=MODEL, input=["a", "b"]).embeddings) == 2
    assert len(client.embeddings(model=MODEL, prompt="a").embedding) == 64


def test_models(client: ollama.Client) -> None:
    assert MODEL in [model.model for model in client.list().models]
    assert MODEL in [model.model for model in client.ps().models]
    assert "tools" in (client.show(MODEL).capabilities or ())
    assert client.pull(MODEL).status == "success"
    assert [part.status for part in client.pull(MODEL, stream=True)] == ["success"]
    for refused in (
        lambda: client.push(MODEL),
        lambda: client.create("new", from_=MODEL),
        lambda: client.copy(MODEL, "new"),
        lambda: client.delete(MODEL),
    ):
        with pytest.raises(ollama.ResponseError, match="cannot") as error:
            refused()
        assert error.value.status_code == 501
    with pytest.raises(ollama.ResponseError, match="cannot pull") as error:
        client.pull("other")
    assert error.value.status_code == 404


@pytest.mark.parametrize("keep_alive", [0, -1, "10m", "-1m", 2.5])
def test_keep_alive(engine: Speaker, client: ollama.Client, keep_alive: Any) -> None:
    """The model stays, whatever a client asks for."""
    engine.say("Yes.")
    assert client.chat(model=MODEL, messages=HELLO, keep_alive=keep_alive).message.content == "Yes."
    assert client.generate(model=MODEL, keep_alive=keep_alive).done_reason == "load"
    assert client.ps().models


def test_the_async_client(running: Scripted, engine: Speaker) -> None:
    async def main() -> None:
        client = ollama.AsyncClient(host=running.url)
        engine.say("One two.", "One two.")
        parts = [part async for part in await client.chat(MODEL, messages=HELLO, stream=True)]
        assert "".join(part.message.content or "" for part in parts) == "One two."
        assert (await client.generate(MODEL, prompt="Hello.")).response == "One two."
        with pytest.raises(ollama.ResponseError, match="nonsense"):
            await client.chat("nonsense", messages=HELLO)

    asyncio.run(main())
