"""Fields that clients always send, and alternative names of fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from quire.errors import ConfigError
from quire.server.args import ServerArgs
from tests.server.fakes import FakeClient
from tests.server.inprocess import PROMPT, assert_error, connect, post, run
from tests.server.scripted import MODEL, scripted_engine, serve

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
THOUGHT = ("<think>", "hm", "</think>", "Yes.")


def ask(path: str, body: Any, **options: Any) -> httpx.Response:
    return post(path, body, scripted_engine("Yes."), **options)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", PROMPT),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"input": "hi"}),
    ],
)
def test_unknown_fields_may_be_null(path: str, body: dict[str, Any]) -> None:
    assert ask(path, {**body, "new_field": None}).status_code == 200
    assert_error(ask(path, {**body, "new_field": 0}), 400, "new_field", "unknown_parameter")


def test_nulls_within() -> None:
    part = {"type": "text", "text": "hi", "new": None, "cache_control": None}
    body = {"messages": [{"role": "user", "content": [part], "new": None}]}
    assert ask("/v1/chat/completions", body).status_code == 200


@pytest.mark.parametrize(
    ("control", "status"),
    [
        ({"type": "ephemeral"}, 200),
        ({"type": "ephemeral", "ttl": "1h"}, 200),
        ({"type": "persistent"}, 400),
        ("ephemeral", 400),
    ],
)
def test_cache_control_of_text_parts(control: Any, status: int) -> None:
    part = {"type": "text", "text": "hi", "cache_control": control}
    answer = ask("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})
    assert answer.status_code == status


def test_a_model_may_have_several_names() -> None:
    async def go() -> list[httpx.Response]:
        args = ServerArgs(served_model_name=("one", "two"))
        async with connect(FakeClient(), args) as http:
            return [
                await http.get("/v1/models"),
                await http.get("/v1/models/two"),
                await http.post("/v1/completions", json={**PROMPT, "model": "two"}),
                await http.post("/v1/completions", json={**PROMPT, "model": "fake"}),
            ]

    models, model, answer, refused = run(go())
    assert [card["id"] for card in models.json()["data"]] == ["one", "two"]
    assert model.json()["id"] == "two"
    assert answer.json()["model"] == "one"
    assert_error(refused, 404, "model", "model_not_found")
    with pytest.raises(ConfigError):
        ServerArgs(served_model_name=("",))


def test_a_model_in_a_file_is_named_without_its_path(tmp_path: Path) -> None:
    file = tmp_path / "SmolLM2.Q4_1.gguf"
    file.touch()

    async def go() -> httpx.Response:
        client = FakeClient()
        client.config.model_name, client.config.model_path = str(file), "/somewhere"
        async with connect(client, ServerArgs()) as http:
            return await http.get("/v1/models")

    assert [card["id"] for card in run(go()).json()["data"]] == ["SmolLM2.Q4_1"]


@pytest.mark.parametrize("path", [".", "./", "../{}", "{}/", "{}/../{}"])
def test_a_model_of_the_current_folder_is_named_as_that(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    monkeypatch.chdir(folder if path[0] == "." else tmp_path)
    given = path.replace("{}", "model")

    async def go() -> httpx.Response:
        client = FakeClient()
        client.config.model_name, client.config.model_path = given, str(Path(given))
        async with connect(client, ServerArgs()) as http:
            return await http.get("/v1/models")

    assert [card["id"] for card in run(go()).json()["data"]] == ["model"]


@pytest.mark.parametrize(
    ("names", "own", "fits", "misses"),
    [
        (("mine", "claude-*", "gpt-*"), "mine", ["mine", "claude-4", "gpt-"], ["gpt", "xclaude-4"]),
        (("*",), "fake", ["fake", "a", "a/b:c", "é"], []),
        (
            ("a*c", "[x]?.*"),
            "fake",
            ["fake", "abc", "[x]?.", "[x]?.y"],
            ["ab", "abcd", "x?.", "[x]a."],
        ),
        (("one", "two"), "one", ["one", "two"], ["fake", "three"]),
    ],
)
def test_names_with_patterns(
    names: tuple[str, ...], own: str, fits: list[str], misses: list[str]
) -> None:
    async def go() -> None:
        client = FakeClient(adapters=("claude-lora",))
        async with connect(client, ServerArgs(served_model_name=names)) as http:
            for name in fits:
                answer = await http.post("/v1/completions", json={"prompt": [1], "model": name})
                assert (answer.status_code, answer.json()["model"]) == (200, own)
                card = (await http.get(f"/v1/models/{quote(name)}")).json()
                assert (card["id"], card["parent"]) == (name, None)
            for name in misses:
                answer = await http.post("/v1/completions", json={"prompt": [1], "model": name})
                assert_error(answer, 404, "model", "model_not_found")
            listed = (await http.get("/v1/models")).json()["data"]
            expected = [*names] if own in names else [own, *names]
            assert [card["id"] for card in listed] == [*expected, "claude-lora"]
            assert [card["parent"] for card in listed] == [None] * len(expected) + [own]
            # An adapter goes before a pattern.
            card = (await http.get("/v1/models/claude-lora")).json()
            assert card["parent"] == own

    run(go())


def test_a_pattern_is_no_way_around_a_keys_models(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[a]\nkey = "a"\nmodels = ["claude-4"]\n[b]\nkey = "b"\nmodels = ["mine"]\n')
    file.chmod(0o600)
    args = ServerArgs(served_model_name=("mine", "claude-*"), api_key_file=str(file))

    async def go() -> None:
        async with connect(FakeClient(), args) as http:
            for key, status in (("a", 404), ("b", 200)):
                headers = {"authorization": f"Bearer {key}"}
                body = {"prompt": [1], "model": "claude-4"}
                answer = await http.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == status

    run(go())


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_head_of_probes(path: str) -> None:
    async def go() -> list[httpx.Response]:
        async with connect(FakeClient()) as alive, connect(FakeClient(alive=False)) as dead:
            return [await alive.head(path), await dead.head(path)]

    assert [answer.status_code for answer in run(go())] == [200, 503]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {**CHAT, "reasoning_effort": "low"}, "reasoning_effort"),
        ("/v1/responses", {"input": "hi", "reasoning": {"effort": "low"}}, "reasoning.effort"),
    ],
)
def test_an_effort_that_the_template_does_not_use(
    path: str, fields: dict[str, Any], param: str
) -> None:
    strict = ServerArgs(strict_fields=True)
    assert_error(ask(path, fields, args=strict), 400, param, "unsupported_parameter")
    args = ServerArgs(strict_fields=True, ignore_reasoning_effort=True)
    assert ask(path, fields, args=args).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {**CHAT, "reasoning_effort": "none"}),
        ("/v1/responses", {"input": "hi", "reasoning": {"effort": "none"}}),
    ],
)
def test_a_model_that_does_not_reason_makes_no_effort(path: str, fields: dict[str, Any]) -> None:
    assert ask(path, fields).status_code == 200


def test_an_effort_of_messages_that_the_template_does_not_use() -> None:
    fields = {**CHAT, "model": MODEL, "max_tokens": 5, "output_config": {"effort": "low"}}
    assert ask("/v1/messages", fields, args=ServerArgs(strict_fields=True)).status_code == 400
    args = ServerArgs(strict_fields=True, ignore_reasoning_effort=True)
    assert ask("/v1/messages", fields, args=args).status_code == 200


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"include": ["reasoning.encrypted_content"]}, 200),
        ({"include": ["file_search_call.results"]}, 400),
        ({"reasoning": {"summary": "auto"}}, 200),
        ({"reasoning": {"generate_summary": "auto", "effort": None}}, 200),
        ({"reasoning": {"summary": "detailed"}}, 200),
        ({"reasoning": {"mode": "fast"}}, 400),
    ],
)
def test_reasoning_of_responses(fields: dict[str, Any], status: int) -> None:
    assert ask("/v1/responses", {"input": "hi", **fields}).status_code == status


def test_reasoning_has_two_names() -> None:
    args = ServerArgs(generation_config="none", reasoning_parser="qwen3")
    with serve(scripted_engine(*THOUGHT), args) as server:
        chat = server.openai().chat.completions
        message = chat.create(model=MODEL, messages=CHAT["messages"]).choices[0].message
        assert (message.reasoning, message.reasoning_content) == ("hm", "hm")
        stream = chat.create(model=MODEL, messages=CHAT["messages"], stream=True)
        deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
        for name in ("reasoning", "reasoning_content"):
            assert "".join(getattr(delta, name, None) or "" for delta in deltas) == "hm"


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"reasoning": "a"}, 200),
        ({"reasoning": "a", "reasoning_content": "a"}, 200),
        ({"reasoning": "a", "reasoning_content": None}, 200),
        ({"reasoning": "a", "reasoning_content": "b"}, 400),
        ({"reasoning": 5}, 400),
    ],
)
def test_reasoning_goes_back_under_either_name(fields: dict[str, Any], status: int) -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": "Hi", **fields}]
    assert ask("/v1/chat/completions", {"messages": messages}).status_code == status
