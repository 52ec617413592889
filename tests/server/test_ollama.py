"""Ollama's API over a scripted engine. The bodies named RECORDED are those of `ollama` 0.6.3."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from quire.engine.loop.embedding import Embedding
from quire.errors import ConfigError
from quire.server.apis.ollama.convert import messages_of
from quire.server.apis.ollama.protocol import OllamaMessage
from quire.server.args import ServerArgs
from quire.server.process.listen import bind_all
from tests.server.scripted import MODEL, Scripted, Speaker, serve

RECORDED_TOOLS = (
    '{"model":"scripted","stream":false,"options":{"temperature":0,"num_predict":64},"keep_alive":'
    '"10m","messages":[{"role":"user","content":"Weather?"}],"tools":[{"type":"function",'
    '"function":{"name":"look","description":"Looks.","parameters":{"type":"object","required":'
    '["city"],"properties":{"city":{"type":"string","description":"Where."}}}}}]}'
)
RECORDED_RESULT = (
    '{"model":"scripted","stream":true,"messages":[{"role":"user","content":"Weather?"},{"role":'
    '"assistant","tool_calls":[{"function":{"name":"look","arguments":{"city":"Oslo"}}}]},{"role":'
    '"tool","content":"Rain.","tool_name":"look"}],"tools":[],"think":false}'
)
RECORDED_FORMAT = (
    '{"model":"scripted","stream":false,"format":{"properties":{"legs":{"title":"Legs","type":'
    '"integer"}},"required":["legs"],"title":"A","type":"object"},"prompt":"Hi","system":'
    '"Be brief."}'
)
CALL = '<tool_call>{"name": "look", "arguments": {"city": "Oslo"}}</tool_call>'
ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello."}]}
PROMPT: dict[str, Any] = {"model": MODEL, "prompt": "Hello."}
ARGS = ServerArgs(generation_config="none", ollama_api=0)


VECTOR = np.arange(64, dtype=np.float32)


class EmbeddingSpeaker(Speaker):
    async def vector(self, prompt: Any, **_: Any) -> Embedding:
        return Embedding(values=VECTOR, prompt_token_ids=[1, 2, 3])


@pytest.fixture(scope="module")
def running() -> Iterator[Scripted]:
    with serve(EmbeddingSpeaker(), ARGS) as scripted:
        yield scripted


@pytest.fixture
def engine(running: Scripted) -> Speaker:
    assert isinstance(running.engine, Speaker)
    for kept in (running.engine.texts, running.engine.heard, running.engine.seen):
        kept.clear()
    return running.engine


def post(running: Scripted, path: str, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, str) else json.dumps(body)
    return httpx.post(f"{running.url}{path}", content=content, headers=headers, timeout=30)


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def test_a_stream(running: Scripted, engine: Speaker) -> None:
    engine.say("<think>Hm.</think>Hello there.")
    found = lines(post(running, "/api/chat", ASK))
    assert "".join(line["message"]["content"] for line in found) == "Hello there."
    assert "".join(line["message"].get("thinking", "") for line in found) == "Hm."
    assert all(line["model"] == MODEL and line["created_at"].endswith("Z") for line in found)
    *begun, last = found
    assert not any(line["done"] or "eval_count" in line for line in begun)
    assert (last["done"], last["done_reason"]) == (True, "stop")
    assert last["prompt_eval_count"] == len(engine.seen[0][0])
    assert last["eval_count"] > 0
    durations = ("load_duration", "prompt_eval_duration", "eval_duration")
    assert sum(last[name] for name in durations) == last["total_duration"] > 0


def test_recorded_tools(running: Scripted, engine: Speaker) -> None:
    engine.say(f"I look. {CALL}")
    response = post(running, "/api/chat", RECORDED_TOOLS)
    message = response.json()["message"]
    assert message["content"] == "I look."
    (call,) = message["tool_calls"]
    assert call["id"]
    assert call["function"] == {"name": "look", "arguments": {"city": "Oslo"}, "index": 0}
    assert response.headers["quire-ignored"] == "keep_alive"
    assert (engine.seen[0][1].temperature, engine.seen[0][1].max_tokens) == (0.0, 64)


def test_recorded_result(running: Scripted, engine: Speaker) -> None:
    engine.say("It rains.")
    found = lines(post(running, "/api/chat", RECORDED_RESULT))
    assert "".join(line["message"]["content"] for line in found) == "It rains."
    heard = engine.heard[0]
    assert '"name": "look", "arguments": {"city": "Oslo"}' in heard
    assert "Rain." in heard
    assert heard.endswith("</think>\n\n")  # thinking is turned off


def test_recorded_format(running: Scripted, engine: Speaker) -> None:
    engine.say('{"legs": 4}')
    answer = post(running, "/api/generate", RECORDED_FORMAT).json()
    assert answer["response"] == '{"legs": 4}'
    assert "Be brief." in engine.heard[0]
    assert engine.seen[0][1].structured_outputs is not None


def test_calls_in_a_stream(running: Scripted, engine: Speaker) -> None:
    body = {**json.loads(RECORDED_TOOLS), "stream": True, "options": {}}
    engine.say(f"{CALL}\n{CALL}", f"{CALL} {CALL[:-30]}")
    calls = [line["message"].get("tool_calls") for line in lines(post(running, "/api/chat", body))]
    assert [call[0]["function"]["index"] for call in calls if call] == [0, 1]
    body["options"]["num_predict"] = len(engine.tokenizer.encode(f"{CALL} {CALL[:-30]}")) - 1
    found = lines(post(running, "/api/chat", body))
    assert sum("tool_calls" in line["message"] for line in found) == 1
    assert found[-1]["done_reason"] == "length"


def test_options(running: Scripted, engine: Speaker) -> None:
    engine.say("one two three.", "one")
    options = {
        "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.5, "seed": 7,
        "presence_penalty": 0.5, "frequency_penalty": 0.5, "repeat_penalty": 1.5,
        "num_predict": 3, "stop": ["."], "num_ctx": 4096, "num_gpu": 1, "repeat_last_n": 64,
    }  # fmt: skip
    response = post(running, "/api/generate", {**PROMPT, "options": options, "stream": False})
    params = engine.seen[0][1]
    names = {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"}
    for name in list(options)[:10]:
        assert getattr(params, names.get(name, name)) == options[name]
    assert params.stop == (".",)
    ignored = set(response.headers["quire-ignored"].split(", "))
    assert ignored == {"options.num_ctx", "options.num_gpu", "options.repeat_last_n"}
    assert response.json()["done_reason"] == "length"
    free = {"num_predict": -1, "seed": -1, "stop": ".", "mirostat": 0}
    assert post(running, "/api/generate", {**PROMPT, "options": free}).status_code == 200
    params = engine.seen[1][1]
    assert (params.max_tokens, params.seed, params.stop) == (None, None, (".",))


def test_log_probabilities(running: Scripted, engine: Speaker) -> None:
    engine.say("Hello there.", "Hello there.")
    body = {"logprobs": True, "top_logprobs": 1, "stream": False}
    entries = post(running, "/api/chat", {**ASK, **body}).json()["logprobs"]
    assert "".join(entry["token"] for entry in entries) == "Hello there."
    assert all(entry["logprob"] == -1.0 and entry["top_logprobs"] for entry in entries)
    found = lines(post(running, "/api/generate", {**PROMPT, "logprobs": True}))
    tokens = [entry["token"] for line in found for entry in line.get("logprobs", ())]
    assert "".join(tokens) == "Hello there."


def test_context_continues_a_conversation(running: Scripted, engine: Speaker) -> None:
    engine.say("Hello there.", "Yes.")
    first = post(running, "/api/generate", {**PROMPT, "stream": False}).json()
    assert first["context"][: len(engine.seen[0][0])] == engine.seen[0][0]
    again = {**PROMPT, "prompt": "And?", "context": first["context"]}
    last = lines(post(running, "/api/generate", again))[-1]
    assert engine.seen[1][0][: len(first["context"])] == first["context"]
    assert "Hello there." in engine.heard[1]
    assert "And?" in engine.heard[1]
    assert last["context"][: len(engine.seen[1][0])] == engine.seen[1][0]


def test_a_raw_prompt(running: Scripted, engine: Speaker) -> None:
    engine.encode = True
    seen = []
    original = type(engine).generate

    async def generate(self: Speaker, prompt: Any, params: Any, **more: Any) -> Any:
        seen.append(prompt)
        ids = self.tokenizer.encode(prompt).tolist() if isinstance(prompt, str) else prompt
        async for update in original(self, ids, params, **more):
            yield update

    engine.say(" a time.")
    type(engine).generate = generate  # type: ignore[method-assign]
    try:
        answer = post(running, "/api/generate", {**PROMPT, "raw": True, "stream": False}).json()
    finally:
        type(engine).generate = original  # type: ignore[method-assign]
    assert seen == ["Hello."]
    assert answer["response"] == " a time."
    assert "context" not in answer


@pytest.mark.parametrize(
    ("path", "body"),
    [("/api/chat", {"model": MODEL}), ("/api/generate", {"model": MODEL, "keep_alive": -1})],
)
def test_an_empty_request_loads_the_model(running: Scripted, path: str, body: Any) -> None:
    answer = post(running, path, body).json()
    assert (answer["done"], answer["done_reason"]) == (True, "load")
    assert ("message" in answer) == (path == "/api/chat")


def test_embeddings(running: Scripted) -> None:
    body = {"model": f"{MODEL}:latest", "input": ["a", "b"], "dimensions": 3}
    answer = post(running, "/api/embed", body).json()
    assert answer["embeddings"] == [pytest.approx([0.0, 5**-0.5, 2 * 5**-0.5])] * 2
    assert (answer["model"], answer["prompt_eval_count"]) == (body["model"], 6)
    assert (
        len(post(running, "/api/embed", {"model": MODEL, "input": "a"}).json()["embeddings"]) == 1
    )
    assert post(running, "/api/embed", {"model": MODEL, "input": []}).json()["embeddings"] == []
    old = post(running, "/api/embeddings", {"model": MODEL, "prompt": "a"}).json()
    assert old == {"embedding": pytest.approx((VECTOR / np.linalg.norm(VECTOR)).tolist())}


def test_models(running: Scripted) -> None:
    def get(path: str) -> Any:
        return httpx.get(f"{running.url}{path}").json()

    (tag,) = get("/api/tags")["models"]
    (loaded,) = get("/api/ps")["models"]
    assert tag["name"] == tag["model"] == loaded["name"] == MODEL
    assert tag["size"] > 0
    assert tag["details"] == loaded["details"]
    assert (loaded["context_length"], loaded["size_vram"]) == (2048, 0)
    assert tuple(map(int, get("/api/version")["version"].split("."))) > (0, 6, 4)
    for body in ({"model": MODEL}, {"name": f"{MODEL}:latest"}, {"model": MODEL, "verbose": True}):
        shown = post(running, "/api/show", body).json()
        family = shown["model_info"]["general.architecture"]
        assert shown["details"]["family"] == family == "qwen3"
        assert shown["model_info"][f"{family}.context_length"] == 2048
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert post(running, "/api/show", {}).status_code == 400


REFUSED: list[tuple[str, Any, int, str]] = [
    ("/api/chat", {**ASK, "model": "nobody"}, 404, "model not found"),
    ("/api/show", {"model": "nobody"}, 404, "model not found"),
    ("/api/chat", "{", 400, "not valid JSON"),
    ("/api/chat", {"messages": []}, 400, "'model'"),
    ("/api/chat", {**ASK, "options": {"temperature": -1}}, 400, "options.temperature"),
    ("/api/chat", {**ASK, "options": {"repeat_penalty": 0}}, 400, "options.repeat_penalty"),
    ("/api/chat", {**ASK, "options": {"mirostat": 2}}, 400, "'mirostat' is not supported"),
    ("/api/chat", {**ASK, "options": {"heat": 2}}, 400, "'options.heat'"),
    ("/api/chat", {**ASK, "format": "xml"}, 400, "format"),
    ("/api/chat", {**ASK, "format": {"type": "nothing"}}, 400, "format"),
    ("/api/chat", {**ASK, "top_logprobs": 2}, 400, "needs logprobs"),
    ("/api/chat", {**ASK, "unheard": 1}, 400, "'unheard'"),
    ("/api/chat", {"model": MODEL, "messages": [{"role": "user", "images": ["aGk="]}]}, 400,
     "images are not supported"),
    ("/api/generate", {**PROMPT, "images": ["aGk="]}, 400, "images are not supported"),
    ("/api/generate", {**PROMPT, "template": "{{ .Prompt }}"}, 400, "'template'"),
    ("/api/generate", {**PROMPT, "suffix": "}"}, 400, "'suffix'"),
    ("/api/generate", {**PROMPT, "raw": True, "system": "a"}, 400, "'raw' and 'system'"),
    ("/api/generate", {**PROMPT, "suffix": "a", "context": [1]}, 400, "'suffix' and 'context'"),
    ("/api/pull", {"model": "a"}, 404, "cannot pull models"),
    ("/api/pull", {}, 400, "model"),
    ("/api/push", {"model": "a"}, 501, "cannot push models"),
    ("/api/create", {"model": "a"}, 501, "cannot create models"),
    ("/api/copy", {"source": "a"}, 501, "cannot copy models"),
    ("/api/blobs/sha256:1", "", 501, "cannot store blobs"),
    ("/api/nowhere", {}, 404, "no route"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "why"), REFUSED, ids=range(len(REFUSED)))
def test_refusals(running: Scripted, path: str, body: Any, status: int, why: str) -> None:
    response = post(running, path, body)
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    assert why in response.json()["error"]


def test_deleting_is_refused(running: Scripted) -> None:
    response = httpx.request("DELETE", f"{running.url}/api/delete", json={"model": "a"})
    assert (response.status_code, response.json().keys()) == (501, {"error"})


def test_content_types(running: Scripted, engine: Speaker) -> None:
    engine.say("Yes.")
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert post(running, "/api/chat", ASK, **form).status_code == 200
    other = post(running, "/api/chat", ASK, **form, origin="http://localhost:1234")
    assert other.status_code in (403, 415)


def test_an_error_in_a_stream(running: Scripted, engine: Speaker) -> None:
    engine.say("one two three")
    engine.error = None
    original = type(engine).generate

    async def generate(self: Speaker, prompt: Any, params: Any, **more: Any) -> Any:
        async for update in original(self, prompt, params, **more):
            yield update
            await asyncio.sleep(0.05)
            raise ValueError("broken")

    type(engine).generate = generate  # type: ignore[method-assign]
    try:
        found = lines(post(running, "/api/chat", ASK))
    finally:
        type(engine).generate = original  # type: ignore[method-assign]
    assert found[-1] == {"error": "Internal server error."}


def test_strict_fields_refuse_hints() -> None:
    with serve(Speaker(), dataclasses.replace(ARGS, strict_fields=True)) as strict:
        for more in ({"keep_alive": "5m"}, {"options": {"num_ctx": 1}}, {"truncate": True}):
            response = post(strict, "/api/chat", {**ASK, **more})
            assert response.status_code == 400
            assert "is not supported" in response.json()["error"]


def test_keys() -> None:
    with serve(Speaker(), dataclasses.replace(ARGS, api_key=("secret",))) as keyed:
        assert post(keyed, "/api/chat", ASK).status_code == 401
        assert httpx.get(f"{keyed.url}/api/tags").json().keys() == {"error"}
        bearer = {"authorization": "Bearer secret"}
        assert httpx.get(f"{keyed.url}/api/tags", headers=bearer).status_code == 200


def test_without_the_setting_the_error_names_it() -> None:
    with serve(Speaker(), ServerArgs(generation_config="none")) as plain:
        response = post(plain, "/api/chat", ASK)
        assert response.status_code == 404
        assert "--ollama-api 11434" in response.json()["error"]["message"]
        document = httpx.get(f"{plain.url}/openapi.json").json()
    assert not any(path.startswith("/api/") for path in document["paths"])


def test_results_find_their_calls() -> None:
    def call(name: str, id: str | None = None) -> dict[str, Any]:
        return {"function": {"name": name}, **({"id": id} if id else {})}

    given = [
        {"role": "assistant", "tool_calls": [call("a"), call("b"), call("b", "own")]},
        {"role": "tool", "tool_name": "b", "content": "1"},
        {"role": "tool", "tool_call_id": "own", "content": "2"},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4"},
    ]
    shaped = messages_of([OllamaMessage.model_validate(message) for message in given], [])
    ids = [entry["id"] for entry in shaped[0]["tool_calls"]]
    assert ids == ["call_0", "call_1", "own"]
    assert [entry["tool_call_id"] for entry in shaped[1:]] == ["call_1", "own", "call_0", "call"]


def test_a_second_port() -> None:
    sockets = bind_all(ServerArgs(port=0, ollama_api=0))
    ports = {sock.getsockname()[1] for sock in sockets}
    try:
        assert len(ports) == 2
        sockets[1].listen()
        with pytest.raises(ConfigError, match="--ollama-api") as error:
            bind_all(ServerArgs(port=0, ollama_api=sockets[1].getsockname()[1]))
        assert error.value.param == "ollama_api"
    finally:
        for sock in sockets:
            sock.close()
    for port, why in ((70000, "must be in"), (8000, "is also --port")):
        with pytest.raises(ConfigError, match=why):
            ServerArgs(ollama_api=port)
