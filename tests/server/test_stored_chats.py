"""Chat completions that are fetched later, with the `openai` client against a real server."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion

from quire.server.apis.openai.objects import CompletionObject
from quire.server.apis.openai.stored_chats import ChatStore, StoredChat
from quire.server.args import ServerArgs
from quire.server.errors import ApiError
from tests.server.fakes import FakeClient, PlainTokenizer
from tests.server.inprocess import connect, run
from tests.server.schema import conforms
from tests.server.server_process import MODEL, Server

HELLO: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello!", "name": "Ann"},
]


@pytest.fixture
def stored(client: openai.OpenAI) -> Iterator[list[ChatCompletion]]:
    """Three stored chats, the second one streamed; deleted afterwards."""
    options: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 5, "store": True}
    found = []
    for place in range(3):
        options["metadata"] = {"place": str(place), "all": "yes"}
        if place == 1:
            chunks = list(client.chat.completions.create(**options, n=2, stream=True))
            found.append(client.chat.completions.retrieve(chunks[0].id))
            for index, choice in enumerate(found[-1].choices):
                parts = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
                assert choice.message.content == "".join(p.delta.content or "" for p in parts)
                assert choice.finish_reason == parts[-1].finish_reason
        else:
            found.append(client.chat.completions.create(**options))
    yield found
    for one in client.chat.completions.list(limit=100).data:
        client.chat.completions.delete(one.id)


def test_retrieve(client: openai.OpenAI, server: Server, stored: list[ChatCompletion]) -> None:
    for one in stored:
        assert client.chat.completions.retrieve(one.id) == one
    with urllib.request.urlopen(f"{server.url}/v1/chat/completions/{stored[1].id}") as response:
        conforms(ChatCompletion, json.load(response), ("stop_reason",))


def test_list(client: openai.OpenAI, stored: list[ChatCompletion]) -> None:
    ids = [one.id for one in stored]
    assert [one.id for one in client.chat.completions.list()] == ids
    assert [one.id for one in client.chat.completions.list(order="desc")] == ids[::-1]
    first = client.chat.completions.list(limit=2)
    assert ([one.id for one in first.data], first.has_more) == (ids[:2], True)
    assert [one.id for one in client.chat.completions.list(limit=1)] == ids  # page by page
    assert [one.id for one in client.chat.completions.list(metadata={"place": "1"})] == ids[1:2]
    assert list(client.chat.completions.list(metadata={"place": "1", "all": "no"})) == []
    assert [one.id for one in client.chat.completions.list(model=MODEL)] == ids
    assert list(client.chat.completions.list(model="gpt-x")) == []
    for options in ({"after": "nothing"}, {"limit": 0}, {"order": "up"}):
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.list(**options)  # type: ignore[arg-type]
        assert error.value.param == next(iter(options))


def test_messages(client: openai.OpenAI, stored: list[ChatCompletion]) -> None:
    messages = client.chat.completions.messages.list(stored[0].id).data
    assert [(m.role, m.content) for m in messages] == [
        ("system", "Be brief."),
        ("user", "Hello!"),
    ]
    assert len({message.id for message in messages}) == 2
    newest = client.chat.completions.messages.list(stored[0].id, order="desc", limit=1)
    assert (newest.data[0].content, newest.has_more) == ("Hello!", True)


def test_update_and_delete(client: openai.OpenAI, stored: list[ChatCompletion]) -> None:
    id = stored[0].id
    changed = client.chat.completions.update(id, metadata={"mood": "good"})
    assert changed.metadata == {"mood": "good"}
    assert client.chat.completions.retrieve(id).metadata == {"mood": "good"}
    with pytest.raises(openai.BadRequestError, match="metadata"):
        client.chat.completions.update(id, metadata={"x": "y" * 600})
    assert client.chat.completions.delete(id).deleted
    for call in (
        client.chat.completions.retrieve,
        client.chat.completions.delete,
        client.chat.completions.messages.list,
    ):
        with pytest.raises(openai.NotFoundError) as error:
            call(id)
        assert error.value.param == "completion_id"


@pytest.mark.parametrize(("name", "instead"), [("batch", "/v1/batches"), ("render", "/tokenize")])
def test_routes_of_vllm_are_no_ids(server: Server, name: str, instead: str) -> None:
    body = {"messages": [[{"role": "user", "content": "Hello."}]]}
    answer = httpx.post(f"{server.url}/v1/chat/completions/{name}", json=body)
    assert answer.status_code == 404
    assert f"/v1/chat/completions/{name}" in answer.json()["error"]["message"]
    assert instead in answer.json()["error"]["message"]


def test_only_requested_chats_are_stored(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2, store=False)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.retrieve(answer.id)


def test_keys_do_not_see_each_other() -> None:
    async def go() -> list[httpx.Response]:
        client = FakeClient(tokenizer=PlainTokenizer())
        body = {"messages": [{"role": "user", "content": "hi"}], "store": True}
        args = ServerArgs(api_key=("one", "two"))
        async with connect(client, args) as http:
            one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
            path = "/v1/chat/completions"
            id = (await http.post(path, json=body, headers=one)).json()["id"]
            return [
                await http.get(path, headers=one),
                await http.get(path, headers=two),
                await http.get(f"{path}/{id}", headers=one),
                await http.get(f"{path}/{id}", headers=two),
                await http.delete(f"{path}/{id}", headers=two),
                await http.get(f"{path}/{id}", headers=one),
            ]

    mine, others, *rest = run(go())
    assert (len(mine.json()["data"]), others.json()["data"]) == (1, [])
    assert [answer.status_code for answer in rest] == [200, 404, 404, 200]


def test_a_server_that_keeps_nothing() -> None:
    async def go() -> httpx.Response:
        client = FakeClient(tokenizer=PlainTokenizer())
        async with connect(client, ServerArgs(response_store_size=0)) as http:
            body = {"messages": [{"role": "user", "content": "hi"}], "store": True}
            return await http.post("/v1/chat/completions", json=body)

    response = run(go())
    assert (response.status_code, response.json()["error"]["param"]) == (400, "store")


def chat(id: str, text: str = "") -> StoredChat:
    envelope: CompletionObject[Any] = CompletionObject(id, "chat.completion", 0, "m", [])
    return StoredChat(envelope, [{"role": "user", "content": text}], b"")


def test_bounds() -> None:
    now = 0.0
    store = ChatStore(3, 2000, 60.0, clock=lambda: now)
    for place in range(5):
        store.add(chat(str(place)))
    assert [one.completion.id for one in store.all(b"")] == ["2", "3", "4"]
    store.add(chat("big", "x" * 1500))
    assert [one.completion.id for one in store.all(b"")] == ["3", "4", "big"]
    grown = store.get("4", b"")
    grown.messages.append({"role": "user", "content": "x" * 600})
    store.update(grown)
    assert store.size <= 2000
    assert store.size == sum(one.measure() for one in store.all(b""))
    now = 30.0
    store.add(chat("new"))
    now = 61.0
    assert [one.completion.id for one in store.all(b"")] == ["new"]
    store.add(chat("huge", "x" * 5000))
    assert (len(store), store.size) == (0, 0)
    with pytest.raises(ApiError, match="huge"):
        store.get("huge", b"")


def test_a_long_conversation(client: openai.OpenAI) -> None:
    long: list[Any] = [{"role": "user", "content": "word " * 5000}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model=MODEL, messages=long, stream=stream)
        assert (error.value.param, error.value.code) == ("messages", "context_length_exceeded")
