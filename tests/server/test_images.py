"""Images in bodies of all APIs: their places, sources and errors. The reader is a stand-in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineArgs
from quire.errors import RequestError
from quire.features.call import PromptPart
from quire.server.apis.batch.store import BatchStore
from quire.server.app import build_app
from quire.server.args import ServerArgs
from tests.server.fakes import FakeClient, PlainTokenizer
from tests.server.inprocess import connect, post, run

DATA = "data:image/png;base64,aGk="
SHOWN = "#"


class Tokenizer(PlainTokenizer):
    """Shows an image as one character."""

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        return "|".join(_text(message["content"]) for message in messages)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else SHOWN for part in content)


class Inputs:
    def __init__(self, parts: Sequence[PromptPart]) -> None:
        self.parts = parts

    def shifted(self, count: int) -> Inputs:
        return self


class Loaded:
    """A part that was read. `closed` counts those that were closed."""

    closed = 0

    def __init__(self, part: PromptPart) -> None:
        self.part = part

    def close(self) -> None:
        type(self).closed += 1


class Reader:
    """Keeps what it is given. `refused` names a part's field that it refuses."""

    def __init__(self, refused: str = "") -> None:
        self.parts: list[PromptPart] = []
        self.prompt = ""
        self._refused = refused

    async def load(self, parts: Sequence[PromptPart]) -> Sequence[Any]:
        self.parts = list(parts)
        for part in parts:
            if part.param == self._refused:
                raise RequestError(f"Invalid value for '{part.param}': damaged.", part.param, "bad")
        return [Loaded(part) for part in parts]

    def place(self, ids: Any, parts: Sequence[Any]) -> tuple[Any, Any]:
        self.prompt = "".join(map(chr, ids))
        assert self.prompt.count(SHOWN) == len(parts)
        return ids, Inputs(parts)

    @property
    def found(self) -> list[tuple[Any, str, str]]:
        return [(part.source, part.param, part.detail) for part in self.parts]


def ask(path: str, body: Any, refused: str = "") -> tuple[Reader, Any]:
    reader = Reader(refused)
    client = FakeClient(tokenizer=Tokenizer(), prompt_reader=reader)
    return reader, post(path, body, client, args=ServerArgs(ollama_api=11434))


def image(url: Any = DATA, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def text(text: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": text}


def test_the_end_of_a_request_closes_its_parts() -> None:
    before = Loaded.closed
    ask("/v1/chat/completions", {"messages": [user(image(), image())]})
    ask("/tokenize", {"messages": [user(image())]})
    assert Loaded.closed == before + 3


def test_chat_completions() -> None:
    messages = [
        {"role": "system", "content": "s"},
        user(text("a"), image(detail="low"), text("b"), image("https://x.org/i.png")),
        {"role": "assistant", "content": "c"},
        user({"type": "image_url", "image_url": DATA}),
    ]
    reader, answer = ask("/v1/chat/completions", {"messages": messages})
    assert answer.status_code == 200, answer.text
    assert reader.prompt == "s|a#b#|c|#"
    assert reader.found == [
        (DATA, "messages[1].content[1]", "low"),
        ("https://x.org/i.png", "messages[1].content[3]", "auto"),
        (DATA, "messages[3].content[0]", "auto"),
    ]
    reader, answer = ask("/tokenize", {"messages": messages})
    assert answer.json()["count"] == len("s|a#b#|c|#")


def test_results_of_tools() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [call], "content": "c"},
        {"role": "tool", "tool_call_id": "1", "content": [image(), text("b")]},
    ]
    reader, _ = ask("/tokenize", {"messages": [messages[0], messages[2] | {"name": "look"}]})
    assert reader.found == [(DATA, "messages[1].content[0]", "auto")]


def test_messages() -> None:
    base = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    blocks = [
        text("a"),
        {"type": "image", "source": base, "cache_control": {"type": "ephemeral"}},
        text("b"),
        {"type": "image", "source": {"type": "url", "url": "https://x.org/i.png"}},
    ]
    reader, answer = ask(
        "/v1/messages", {"model": "fake", "max_tokens": 9, "messages": [user(*blocks)]}
    )
    assert answer.status_code == 200, answer.text
    assert reader.prompt == "a#b#"
    assert reader.found == [
        (DATA, "messages[0].content[1]", "auto"),
        ("https://x.org/i.png", "messages[0].content[3]", "auto"),
    ]
    _, answer = ask("/v1/messages/count_tokens", {"model": "fake", "messages": [user(*blocks)]})
    assert answer.json()["input_tokens"] == 4


def test_messages_with_results() -> None:
    base = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    use = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    result = {
        "type": "tool_result",
        "tool_use_id": "1",
        "content": [text("a"), {"type": "image", "source": base}, text("b")],
    }
    body = {
        "model": "fake",
        "messages": [user(text("q")), {"role": "assistant", "content": [use]}, user(result)],
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
    }
    client = FakeClient(tokenizer=ShowsTools(), prompt_reader=(reader := Reader()))
    args = ServerArgs(tool_call_parser="hermes")
    answer = post("/v1/messages/count_tokens", body, client, args=args)
    assert answer.status_code == 200, answer.text
    assert reader.found == [(DATA, "messages[2].content[0].content[1]", "auto")]
    assert reader.prompt.endswith("a#b")


class ShowsTools(Tokenizer):
    def traits(self, template: Any) -> Any:
        found = super().traits(template)
        return type(found)(shows_tools=True, shows_calls=True)


def test_responses() -> None:
    part = {"type": "input_image", "image_url": DATA, "detail": "high"}
    items = [user(text("a", "input_text"), part), user(part)]
    reader, answer = ask("/v1/responses", {"input": items})
    assert answer.status_code == 200, answer.text
    assert reader.prompt == "a#|#"
    assert reader.found == [
        (DATA, "input[0].content[1]", "high"),
        (DATA, "input[1].content[0]", "high"),
    ]
    _, answer = ask("/v1/responses/input_tokens", {"input": items})
    assert answer.json()["input_tokens"] == 4


def test_a_conversation_with_images_goes_on() -> None:
    part = {"type": "input_image", "image_url": DATA}
    reader = Reader()

    async def go() -> tuple[Any, Any]:
        client = FakeClient(tokenizer=Tokenizer(), prompt_reader=reader)
        async with connect(client) as http:
            first = (await http.post("/v1/responses", json={"input": [user(part)]})).json()
            more = {"input": "b", "previous_response_id": first["id"]}
            second = await http.post("/v1/responses", json=more)
            listed = await http.get(f"/v1/responses/{first['id']}/input_items")
            return second, listed.json()

    second, listed = run(go())
    assert second.status_code == 200, second.text
    assert reader.found == [(DATA, "previous_response_id", "auto")]
    assert listed["data"][0]["content"] == [
        {"type": "input_image", "detail": "auto", "file_id": None, "image_url": DATA}
    ]


def test_stored_chats_show_images() -> None:
    async def go() -> Any:
        client = FakeClient(tokenizer=Tokenizer(), prompt_reader=Reader())
        async with connect(client) as http:
            body = {"messages": [user(text("a"), image())], "store": True}
            chat = (await http.post("/v1/chat/completions", json=body)).json()
            return (await http.get(f"/v1/chat/completions/{chat['id']}/messages")).json()

    (message,) = run(go())["data"]
    assert message["content"] == [text("a"), image(detail="auto")]


def test_ollama() -> None:
    messages = [{"role": "user", "content": "a", "images": ["aGk=", "aGo="]}]
    reader, answer = ask("/api/chat", {"model": "fake", "messages": messages, "stream": False})
    assert answer.status_code == 200, answer.text
    assert reader.prompt == "##a"
    assert [part.param for part in reader.parts] == [
        "messages[0].images[0]",
        "messages[0].images[1]",
    ]
    body = {"model": "fake", "prompt": "b", "images": ["aGk="], "stream": False}
    reader, answer = ask("/api/generate", body)
    assert reader.found == [("aGk=", "images[0]", "auto")]
    _, answer = ask("/api/generate", {**body, "raw": True})
    assert (answer.status_code, "'raw' and 'images'" in answer.text) == (400, True)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "/v1/chat/completions",
            {"messages": [user(text("a"), image())]},
            "messages[0].content[1]",
        ),
        (
            "/v1/responses",
            {"input": [user({"type": "input_image", "image_url": DATA})]},
            "input[0].content[0]",
        ),
        ("/api/generate", {"model": "fake", "prompt": "b", "images": ["x"]}, "images[0]"),
    ],
)
def test_a_damaged_image_is_named(path: str, body: Any, param: str) -> None:
    _, answer = ask(path, body, refused=param)
    assert answer.status_code == 400
    assert param in answer.text


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "system", "content": [image()]}]},
            "role 'system' has no images",
        ),
        ("/v1/chat/completions", {"messages": [user(image(detail="x"))]}, "detail"),
        (
            "/v1/chat/completions",
            {"messages": [user(image())], "truncate_prompt_tokens": 3},
            "truncate_prompt_tokens",
        ),
        ("/v1/embeddings", {"messages": [user(image())]}, "embeddings of images"),
        ("/v1/responses", {"input": [user({"type": "input_image"})]}, "'image_url' or a 'file_id'"),
        (
            "/v1/responses",
            {"input": [user({"type": "input_image", "file_id": "file-x"})]},
            "keeps no files",
        ),
        (
            "/v1/messages",
            {
                "model": "fake",
                "max_tokens": 9,
                "messages": [user({"type": "image", "source": {"type": "base64", "data": "a"}})],
            },
            "media_type",
        ),
    ],
)
def test_refusals(path: str, body: Any, text: str) -> None:
    _, answer = ask(path, body)
    assert 400 <= answer.status_code < 500
    assert text in answer.text


def test_files(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 1 << 20, 3600.0)
    reader = Reader()

    async def go() -> tuple[Any, Any, Any]:
        import httpx

        client = FakeClient(tokenizer=Tokenizer(), prompt_reader=reader)
        client.config.scheduler.max_num_seqs = 4
        app = build_app(client, ServerArgs(), batch_store=store)  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            form = {"purpose": "vision"}
            file = {"file": ("i.png", b"hi")}
            made = (await http.post("/v1/files", data=form, files=file)).json()
            part = {"type": "input_image", "file_id": made["id"]}
            first = await http.post("/v1/responses", json={"input": [user(part)]})
            source = reader.parts[0].source.read_bytes()
            block = {"type": "image", "source": {"type": "file", "file_id": "file-none"}}
            body = {"model": "fake", "max_tokens": 9, "messages": [user(block)]}
            return first, source, await http.post("/v1/messages", json=body)

    first, source, missing = run(go())
    assert (first.status_code, source) == (200, b"hi")
    assert missing.status_code == 404
    assert "messages[0].content[0]" in missing.text


def test_the_models_card_has_the_limits() -> None:
    async def card(client: FakeClient, **args: Any) -> Any:
        async with connect(client, ServerArgs(**args)) as http:
            return (await http.get("/v1/models")).json()["data"][0]

    client = FakeClient()
    assert "images" not in run(card(client))
    client.config.images = True
    client.config.args = EngineArgs(model="fake", max_image_bytes=1000, max_images=3)
    limits = {"max_images": 3, "max_bytes": 1000, "max_pixels": 64 << 20}
    assert run(card(client))["images"] == limits
    client.config.args = EngineArgs(model="fake")
    # 20 MiB, as base64, would not fit into a body of 16 MB.
    assert run(card(client))["images"]["max_bytes"] == (16_000_000 - (64 << 10)) * 3 // 4
