"""Responses over a WebSocket, with a scripted model."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types.responses import ResponsesServerEvent, ResponseStreamEvent

from quire.features.conversation_leases.calls import CONVERSATION, END
from quire.server.apis.responses import socket
from quire.server.apis.responses.steering import MAX_STEERS
from quire.server.args import ServerArgs
from quire.server.chat.prompt_memo import PromptMemo
from quire.server.process.uvicorn_server import BoundedHttpProtocol
from quire.text.tokenizer import Tokenizer
from tests.server.schema import conforms
from tests.server.scripted import EMBEDDED, MODEL, Scripted, Speaker, serve
from tests.server.socket_client import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    SocketClient,
    frame_of,
)

NOT_IN_THE_TYPES = ("store", "name", "status")
TOOL: dict[str, Any] = {"type": "function", "name": "look", "parameters": {"type": "object"}}
CALL = '<tool_call>{"name": "look", "arguments": {"n": %d}}</tool_call>'
USER = {"role": "user", "content": "Hello."}


def speaker(server: Scripted) -> Speaker:
    assert isinstance(server.engine, Speaker)
    return server.engine


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    engine = Speaker()
    engine.config.scheduler.max_model_len = 100_000
    with serve(engine, http=BoundedHttpProtocol) as running:
        yield running


@pytest.fixture
def client(server: Scripted) -> Iterator[SocketClient]:
    speaker(server).texts.clear()
    client = SocketClient(server.url)
    assert client.status == 101
    yield client
    client.socket.close()


def types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


def test_a_turn(server: Scripted, client: SocketClient) -> None:
    speaker(server).say("Yes, one two three.")
    events = client.turn(model=MODEL, input=[USER])
    for event in events:
        conforms(ResponseStreamEvent, event, NOT_IN_THE_TYPES)
    assert types(events)[:2] == ["response.created", "response.in_progress"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    assert text == "Yes, one two three."
    speaker(server).say("Yes, one two three.")
    body = {"model": MODEL, "input": [USER], "stream": True}
    over_http = httpx.post(f"{server.url}/v1/responses", json=body).text
    assert over_http.count("data: ") == len(events)


def test_a_conversation(server: Scripted, client: SocketClient) -> None:
    """Turns send only new items; the prompts are those of HTTP, and mostly tokenized before."""
    engine = speaker(server)
    history: list[Any] = [USER]
    new: list[Any] = [USER]
    previous = None
    for turn in range(6):
        engine.say(CALL % turn)
        fields: dict[str, Any] = {"model": MODEL, "tools": [TOOL], "instructions": "Look."}
        events = client.turn(input=new, previous_response_id=previous, store=False, **fields)
        prompt, _ = engine.seen[-1]
        response = events[-1]["response"]
        (call,) = response["output"]
        assert json.loads(call["arguments"]) == {"n": turn}
        engine.say("Yes.")
        answer = httpx.post(f"{server.url}/v1/responses", json={"input": history, **fields})
        assert answer.status_code == 200
        assert engine.seen[-1][0] == prompt  # the same tokens as without a connection
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": f"r{turn}"}
        previous, new = response["id"], [result]
        history += [call, result]
    found = httpx.get(f"{server.url}/v1/responses/{previous}")
    assert found.status_code == 404  # store=false: only the connection has it


def test_responses_of_other_connections(server: Scripted, client: SocketClient) -> None:
    speaker(server).say("One.", "Two.")
    stored = client.turn(model=MODEL, input=[USER])[-1]["response"]["id"]
    other = SocketClient(server.url)
    more = {"input": [USER], "model": MODEL}
    assert types(other.turn(previous_response_id=stored, **more))[-1] == "response.completed"
    speaker(server).say("Three.")
    kept = client.turn(store=False, **more)[-1]["response"]["id"]
    (error,) = other.turn(previous_response_id=kept, **more)
    assert (error["type"], error["status"]) == ("error", 400)
    assert error["error"]["code"] == "previous_response_not_found"
    assert error["error"]["param"] == "previous_response_id"
    speaker(server).say("Four.")
    assert types(other.turn(**more))[-1] == "response.completed"  # the connection goes on
    other.close()


def test_warm_up(server: Scripted, client: SocketClient) -> None:
    speaker(server).say("Not shown.", "Yes.")
    events = client.turn(model=MODEL, input=[USER], generate=False, store=False)
    assert types(events) == ["response.created", "response.in_progress", "response.completed"]
    response = events[-1]["response"]
    assert response["output"] == []
    assert response["usage"]["output_tokens"] == 0
    assert speaker(server).seen[-1][1].max_tokens == 1
    more = {"model": MODEL, "previous_response_id": response["id"], "input": [USER]}
    assert client.turn(**more)[-1]["response"]["output"][0]["content"][0]["text"] == "Yes."


def test_turns_name_their_conversation_until_its_end(
    server: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = speaker(server)
    named: list[Any] = []
    ended: list[Any] = []
    generate = engine.generate

    def naming(*args: Any, fields: Any, **options: Any) -> Any:
        named.append(fields[CONVERSATION])
        return generate(*args, **options)

    async def call(call: Any, request: Any) -> bool:
        assert call is END
        ended.append(request)
        return True

    monkeypatch.setattr(engine, "generate", naming)
    monkeypatch.setattr(engine, "call", call)
    engine.texts[:] = ["a."] * 3
    client = SocketClient(server.url)
    for stream in ("x", "y", "x"):
        client.turn(model=MODEL, input="a", stream_id=stream)
    assert named[0] == named[2] != named[1]
    client.close()
    for _ in range(200):
        if set(named) <= set(ended):
            break
        httpx.get(f"{server.url}/health")
    assert set(named) <= set(ended)


def test_streams_of_one_connection(server: Scripted, client: SocketClient) -> None:
    speaker(server).say("a b c.", "a b c.", "a b c.")
    for stream in ("x", "y", "x"):
        client.send(model=MODEL, input=[USER], stream_id=stream)
    ended = []
    while len(ended) < 3:
        event = client.event()
        assert event["stream_id"] in ("x", "y")
        if event["type"] == "response.completed":
            ended.append(event["stream_id"])
    assert sorted(ended) == ["x", "x", "y"]


@pytest.mark.parametrize(
    ("event", "param"),
    [
        ({"type": "response.inject"}, "type"),
        ({"model": MODEL}, "type"),
        ({"type": "response.create", "model": MODEL}, "input"),
        ({"type": "response.create", "input": 7}, "input"),
        ({"type": "response.create", "input": "a", "nonsense": 1}, "nonsense"),
        ({"type": "response.create", "input": "a", "background": True}, "background"),
        ({"type": "response.create", "input": "a", "stream_id": ""}, "stream_id"),
        ({"type": "response.create", "input": "a", "model": "other"}, "model"),
    ],
)
def test_refused_events(client: SocketClient, event: dict[str, Any], param: str) -> None:
    client.send_frame(TEXT, json.dumps(event).encode())
    error = client.event()
    assert error["type"] == "error"
    assert 400 <= error["status"] < 500
    assert error["error"]["param"] == param


# -- steering ----------------------------------------------------------------------------------

SENTENCE = "one two three four. "
LONG_CALL = '<tool_call>{"name": "look", "arguments": {"n": "%s"}}</tool_call>'


def steer(client: SocketClient, response: str, given: Any = "Stop.", **more: Any) -> None:
    event = {"type": "response.steer", "previous_response_id": response, "input": given, **more}
    client.send_frame(TEXT, json.dumps(event).encode())


def until(client: SocketClient, *kinds: str) -> list[dict[str, Any]]:
    """Returns the events until one of these types."""
    events = [client.event()]
    while events[-1]["type"] not in kinds:
        events.append(client.event())
    return events


def test_steering_ends_a_text_and_continues(server: Scripted, client: SocketClient) -> None:
    engine = speaker(server)
    engine.say(SENTENCE * 2000, "Yes.")
    client.send(model=MODEL, input="a", instructions="Be brief.", stream_id="x", store=False)
    events = until(client, "response.output_text.delta")
    first = events[0]["response"]["id"]
    steer(client, first, "Only b.")
    steer(client, first, [{"role": "user", "content": [{"type": "input_text", "text": "And c."}]}])
    events += until(client, "response.incomplete")
    while events[-1]["type"] != "response.completed":
        events.append(client.event())
    for event in events:
        conforms(ResponsesServerEvent, event, ("store", "name", "status"))
        assert event["stream_id"] == "x"
    accepted = [event for event in events if event["type"] == "response.steer.accepted"]
    assert accepted[0]["steer"]["previous_response_id"] == first
    incomplete = next(event for event in events if event["type"] == "response.incomplete")
    assert incomplete["response"]["incomplete_details"] == {"reason": "steered"}
    successor = events[-1]["response"]
    assert successor["previous_response_id"] == first
    assert successor["instructions"] == "Be brief."
    prompt = engine.heard[-1]
    said = incomplete["response"]["output"][0]["content"][0]["text"]
    assert 0 < len(said) < len(SENTENCE) * 2000
    assert prompt.index("Be brief.") < prompt.index(said) < prompt.index("Only b.")
    assert len(accepted) == 1 or prompt.index("Only b.") < prompt.index("And c.")
    numbers = [event["sequence_number"] for event in events if "sequence_number" in event]
    assert len(set(numbers[: numbers.index(0, 1)])) == numbers.index(0, 1)


def test_steering_waits_for_results_of_tools(server: Scripted, client: SocketClient) -> None:
    engine = speaker(server)
    engine.say(LONG_CALL % (SENTENCE * 500))
    client.send(model=MODEL, input="a", tools=[TOOL])
    events = until(client, "response.function_call_arguments.delta", "response.output_item.added")
    parent = events[0]["response"]["id"]
    steer(client, parent, "Also b.")
    events += until(client, "response.steer.pending")
    assert events[-2]["type"] == "response.completed"
    (call,) = events[-2]["response"]["output"]
    assert json.loads(call["arguments"]) == {"n": SENTENCE * 500}
    (needed,) = events[-1]["required_input"]
    assert needed == {
        "type": "function_call_output", "call_id": call["call_id"], "name": "look",
    }  # fmt: skip
    conforms(ResponsesServerEvent, events[-1])
    (error,) = client.turn(model="other", previous_response_id=parent, input=[])
    assert error["error"]["param"] == "model"  # the input stays
    engine.say("Yes.", "Yes.")
    turn = {"model": MODEL, "tools": [TOOL], "previous_response_id": parent}
    client.turn(input=[{**needed, "output": "seen"}], **turn)
    prompt = engine.heard[-1]
    assert prompt.count("Also b.") == 1
    assert prompt.count("seen") == 1
    client.turn(input=[{**needed, "output": "again"}], **turn)
    assert "again" in engine.heard[-1]
    assert "Also b." not in engine.heard[-1]


@pytest.mark.parametrize(
    ("given", "more", "code"),
    [
        ("", {}, None),
        ([], {}, "invalid_input"),
        (7, {}, "invalid_input"),
        ([{"role": "system", "content": "a"}], {}, "invalid_input"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], {}, "invalid_input"),
        ([{"type": "function_call_output", "call_id": "a", "output": "b"}], {}, "invalid_input"),
        ("a", {"stream_id": "x"}, "invalid_input"),
        ("a", {"previous_response_id": "resp_0"}, "response_not_found"),
        ("a", {"previous_response_id": 7}, "invalid_input"),
    ],
)
def test_steering_that_fails(
    server: Scripted, client: SocketClient, given: Any, more: dict[str, Any], code: str | None
) -> None:
    speaker(server).say(SENTENCE * 300, "Yes.")
    client.send(model=MODEL, input="a")
    parent = client.event()["response"]["id"]
    event = {"type": "response.steer", "previous_response_id": parent, "input": given, **more}
    client.send_frame(TEXT, json.dumps(event).encode())
    last = until(client, "response.steer.failed", "response.steer.accepted")[-1]
    assert last.get("error", {}).get("code") == code
    if code is not None:
        assert last["steer"]["input"] == given


def test_steering_of_ended_responses(server: Scripted, client: SocketClient) -> None:
    speaker(server).say("Yes.", "Yes.", "Yes.")
    ended = client.turn(model=MODEL, input="a", stream_id="x")[-1]["response"]["id"]
    latest = client.turn(model=MODEL, input="a", stream_id="x")[-1]["response"]["id"]
    for response in (ended, latest):
        steer(client, response)
        assert client.event()["error"]["code"] == "response_already_completed"


def test_many_steers(server: Scripted, client: SocketClient) -> None:
    speaker(server).say(LONG_CALL % (SENTENCE * 2000))
    client.send(model=MODEL, input="a", tools=[TOOL])
    events = until(client, "response.function_call_arguments.delta", "response.output_item.added")
    parent = events[0]["response"]["id"]
    for _ in range(MAX_STEERS + 1):
        steer(client, parent)
    event = until(client, "response.steer.failed")[-1]
    assert event["error"]["code"] == "too_many_pending_steers"


def test_many_streams(server: Scripted, client: SocketClient) -> None:
    speaker(server).texts += ["a."] * 16
    for number in range(17):
        client.send(model=MODEL, input="a", stream_id=f"s{number}")
    events = []
    while len([e for e in events if e["type"] in ("error", "response.completed")]) < 17:
        events.append(client.event())
    assert [e["error"]["param"] for e in events if e["type"] == "error"] == ["stream_id"]


def test_many_waiting_turns(
    server: Scripted, client: SocketClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "MAX_WAITING_BYTES", 3000)
    speaker(server).texts += ["a b c d."] * 8
    for _ in range(8):
        client.send(model=MODEL, input="a" * 1000)
    events = []
    while len([e for e in events if e["type"] in ("error", "response.completed")]) < 8:
        events.append(client.event())
    errors = [event["error"]["code"] for event in events if event["type"] == "error"]
    assert set(errors) == {"rate_limit_exceeded"}
    assert len(errors) < 8


def test_text_that_is_not_json(client: SocketClient) -> None:
    client.send_frame(TEXT, b"nonsense")
    assert client.event()["error"]["code"] == "invalid_json"


def test_keys_and_limits() -> None:
    args = ServerArgs(generation_config="none", api_key=("k",))
    with serve(Speaker(), args, http=BoundedHttpProtocol) as server:
        refused = SocketClient(server.url)
        assert refused.status == 401
        assert b"invalid_api_key" in refused.rest()
        client = SocketClient(server.url, headers={"Authorization": "Bearer k"})
        assert client.status == 101
        speaker(server).say("Yes.")
        assert types(client.turn(model=MODEL, input="a"))[-1] == "response.completed"
        metrics = httpx.get(f"{server.url}/metrics", headers={"Authorization": "Bearer k"}).text
        assert 'route="/v1/responses"' in metrics or "/v1/responses" in metrics


def test_pages_of_other_origins(server: Scripted) -> None:
    host = server.url.removeprefix("http://")
    for origin, status in ((f"http://{host}", 101), ("https://evil.example", 403)):
        assert SocketClient(server.url, headers={"Origin": origin}).status == status


def test_other_paths_and_handshakes(server: Scripted) -> None:
    assert SocketClient(server.url, "/v1/models").status == 200  # the upgrade is ignored
    for headers, status in (
        ({"Sec-WebSocket-Version": "12"}, 400),
        ({"Sec-WebSocket-Key": "short"}, 400),
        ({"X-Long": "a" * 10_000}, 400),
        ({"Upgrade": "h2c"}, 405),
    ):
        client = SocketClient(server.url, headers=headers)
        assert client.status == status
        client.socket.close()


def test_a_refused_handshake_is_no_error_of_the_server(
    server: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    refused = SocketClient(server.url, headers={"Origin": "https://evil.example"})
    refused.rest()
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert not caplog.records


def test_a_frame_beside_the_handshake(server: Scripted) -> None:
    speaker(server).say("Yes.")
    event = {"type": "response.create", "model": MODEL, "input": "a"}
    client = SocketClient(server.url, behind=frame_of(TEXT, json.dumps(event).encode()))
    assert client.status == 101
    assert client.event()["type"] == "response.created"


# -- frames ------------------------------------------------------------------------------------


def test_messages_in_parts_and_pings(server: Scripted, client: SocketClient) -> None:
    client.send_frame(PING, b"hi")
    assert client.frame() == (PONG, b"hi")
    speaker(server).say("Yes.")
    data = json.dumps({"type": "response.create", "model": MODEL, "input": "é" * 70_000}).encode()
    client.send_frame(TEXT, data[:10], final=False)
    client.send_frame(PING, b"")
    client.send_frame(CONTINUATION, data[10:300], final=False)
    client.send_frame(CONTINUATION, data[300:])
    assert client.frame() == (PONG, b"")
    assert client.event()["type"] == "response.created"


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ({"opcode": TEXT, "payload": b"a", "masked": False}, 1002),
        ({"opcode": TEXT, "payload": b"a", "bits": 0x40}, 1002),
        ({"opcode": 3, "payload": b"a"}, 1002),
        ({"opcode": CONTINUATION, "payload": b"a"}, 1002),
        ({"opcode": PING, "payload": b"a" * 126}, 1002),
        ({"opcode": PING, "payload": b"a", "final": False}, 1002),
        ({"opcode": TEXT, "payload": b"\xff"}, 1007),
        ({"opcode": BINARY, "payload": b"a"}, 1003),
        ({"opcode": CLOSE, "payload": struct.pack(">H", 1000)}, 1000),
    ],
)
def test_frames_that_end_the_connection(
    client: SocketClient, frame: dict[str, Any], code: int
) -> None:
    client.send_frame(frame.pop("opcode"), frame.pop("payload"), **frame)
    opcode, payload = client.frame()
    assert opcode == CLOSE
    assert struct.unpack(">H", payload[:2]) == (code,)


def test_large_messages(client: SocketClient) -> None:
    head = struct.pack(">BBQ", 0x81, 0xFF, 1 << 40)
    client.socket.sendall(head)
    opcode, payload = client.frame()
    assert (opcode, struct.unpack(">H", payload[:2])) == (CLOSE, (1009,))


def test_a_client_that_is_gone(server: Scripted) -> None:
    engine = speaker(server)
    client = SocketClient(server.url)
    engine.texts[:] = ["a " * 5000]
    client.send(model=MODEL, input="a")
    assert client.event()["type"] == "response.created"
    client.socket.close()
    for _ in range(200):
        if engine.aborted:
            break
        httpx.get(f"{server.url}/health")
    assert engine.aborted
    engine.aborted.clear()


def test_the_server_stops() -> None:
    with serve(Speaker(), http=BoundedHttpProtocol) as server:
        client = SocketClient(server.url)
        speaker(server).say("Yes.")
        client.turn(model=MODEL, input="a")
    opcode, payload = client.frame()
    assert (opcode, struct.unpack(">H", payload[:2])) == (CLOSE, (1012,))
    assert client.rest() == b""


# -- tokens ------------------------------------------------------------------------------------


def test_the_memo_gives_the_same_tokens() -> None:
    tokenizer = Tokenizer.from_path(EMBEDDED)
    memo = PromptMemo()
    text = ""
    for turn in range(8):
        text += f"<|im_start|>user\nTurn {turn}: héllo  \n<|im_end|>\n<|im_start|>assistant\n"
        ids = memo.encode(tokenizer, text)
        assert ids == tokenizer.encode(text, add_special_tokens=False).tolist()
        assert turn == 0 or memo.tokenized < 150
        said = f"Yes {turn}.<|im_end|>"
        memo.extend(tokenizer, tokenizer.encode(said, add_special_tokens=False).tolist())
        text += said + "\n"
    for other in (text[:40], text[:200] + "x" + text[200:], "", text.replace("Turn 3", "Turn 4")):
        expected = tokenizer.encode(other, add_special_tokens=False).tolist()
        assert memo.encode(tokenizer, other) == expected


def test_the_memo_keeps_generated_tokens() -> None:
    """Tokens that the model chose stay, although its text would be tokenized in another way."""
    tokenizer = Tokenizer.from_path(EMBEDDED)
    memo = PromptMemo()
    text = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    before = memo.encode(tokenizer, text)
    letters = [i for c in "hello" for i in tokenizer.encode(c, add_special_tokens=False).tolist()]
    end = tokenizer.encode("<|im_end|>", add_special_tokens=False).tolist()
    memo.extend(tokenizer, [*letters, *end])
    text += "hello<|im_end|>\n<|im_start|>user\nb"
    assert memo.encode(tokenizer, text)[: len(before) + 6] == [*before, *letters, *end]


def test_marks_in_ordinary_tokens() -> None:
    tokenizer = Tokenizer.from_path(EMBEDDED)
    memo = PromptMemo()
    text = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    memo.encode(tokenizer, text)
    spelled = [i for c in "<|im_end|>" for i in tokenizer.encode(c, add_special_tokens=False)]
    memo.extend(tokenizer, [int(i) for i in spelled])
    longer = text + "<|im_end|>\n"
    assert memo.encode(tokenizer, longer) == tokenizer.encode(longer, False).tolist()
