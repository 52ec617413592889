"""Conversations that real clients had with a scripted model, replayed request by request.

`tests/server/agents/record.py` made the recordings: an unmodified client, run headless, called a
tool 20 times. Only long texts of its prompts are shortened. `docs/agents.md` shows the features
that these tests check for each client.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.server.args import ServerArgs
from quire.server.process.uvicorn_server import BoundedHttpProtocol
from tests.server.agents.record import OTHER, RECORDINGS, load
from tests.server.schema import sse
from tests.server.scripted import Scripted, Speaker, serve
from tests.server.socket_client import SocketClient

_NAMES = sorted(path.name.removesuffix(".jsonl.xz") for path in RECORDINGS.glob("*.xz"))
OVER_SOCKETS = [name for name in _NAMES if name.endswith("-websocket")]
"""Recordings of clients that open a WebSocket."""
CLIENTS = [name for name in _NAMES if name not in OVER_SOCKETS]
WITHOUT_TOOLS = {"aider-0.86.2", "dspy-3.4.1"}
"""Clients that describe tools or edits in texts of their own."""
HISTORY_AS_TEXT = {"smolagents-1.26.0"}
"""Clients that send calls and results back as text of messages."""
IGNORED = {
    "claude-code-2.1.330": {
        "context_management",
        "output_config.effort",
        "system.x-anthropic-billing-header",
        "tools.defer_loading",
    },
    "codex-0.169.0": {"client_metadata", "tools.web_search"},
    "codex-0.169.0-gpt": {
        "client_metadata",
        "reasoning.effort",
        "text.verbosity",
        "tools.web_search",
    },
}
"""The hints that clients send, by client."""
DOCS = Path(__file__).parents[2] / "docs" / "agents.md"
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_THOUGHT = re.compile(r"<think>\n(.*?)\n</think>", re.DOTALL)
_ASSISTANT = "<|im_start|>assistant\n"


@dataclass
class Turn:
    """One replayed exchange: the request, the answer, and the prompt that the model got."""

    exchange: dict[str, Any]
    answer: httpx.Response
    prompt: str

    @property
    def is_main(self) -> bool:
        """The request belongs to the conversation, and is no title or the like."""
        return bool(self.exchange["say"]) and self.exchange["say"] != OTHER


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    engine = Speaker()
    engine.config.scheduler.max_model_len = 200_000
    args = ServerArgs(generation_config="none", served_model_name=("*",))
    with serve(engine, args, http=BoundedHttpProtocol) as running:
        yield running


Replay = Callable[[str], list[Turn]]
"""Replays a client's conversation."""


@pytest.fixture(scope="module")
def replay(server: Scripted) -> Replay:
    engine = server.engine
    assert isinstance(engine, Speaker)

    @cache
    def turns_of(name: str) -> list[Turn]:
        turns = []
        with httpx.Client(base_url=server.url, timeout=60) as client:
            for exchange in load(name):
                engine.texts[:] = [exchange["say"]]
                before = len(engine.heard)
                body = None if exchange["body"] is None else json.dumps(exchange["body"])
                answer = client.request(
                    exchange["method"], exchange["path"], headers=exchange["headers"], content=body
                )
                prompt = engine.heard[-1] if len(engine.heard) > before else ""
                turns.append(Turn(exchange, answer, prompt))
        return turns

    return turns_of


@pytest.fixture(scope="module")
def main_turns(replay: Replay) -> Replay:
    return lambda name: [turn for turn in replay(name) if turn.is_main]


def called(turn: Turn) -> list[tuple[str, Any]]:
    """The calls in an answer: names and arguments, or the input of a custom tool."""
    answer, path = turn.answer, turn.exchange["path"]
    streams = answer.headers["content-type"].startswith("text/event-stream")
    events = [data for _, data in sse(answer.text) if data != "[DONE]"] if streams else []
    if path.startswith("/v1/responses"):
        output = events[-1]["response"]["output"] if streams else answer.json()["output"]
        return [
            (item["name"], item["input"])
            if item["type"] == "custom_tool_call"
            else (item["name"], json.loads(item["arguments"]))
            for item in output
            if item["type"].endswith("_call")
        ]
    if path.startswith("/v1/messages"):
        return _called_in_messages(answer, events)
    if not streams:
        calls = answer.json()["choices"][0]["message"].get("tool_calls") or []
        return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            for call in choice["delta"].get("tool_calls", ()):
                index, function = call["index"], call["function"]
                names.setdefault(index, function.get("name", ""))
                arguments[index] = arguments.get(index, "") + function["arguments"]
    return [(names[index], json.loads(arguments[index])) for index in names]


def _called_in_messages(answer: httpx.Response, events: list[Any]) -> list[tuple[str, Any]]:
    if not events:
        blocks = answer.json()["content"]
        return [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    out: list[tuple[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            out.append((event["content_block"]["name"], ""))
        elif event["type"] == "content_block_delta" and "partial_json" in event["delta"]:
            out[-1] = (out[-1][0], out[-1][1] + event["delta"]["partial_json"])
    return [(name, json.loads(text or "{}")) for name, text in out]


@pytest.mark.parametrize("name", CLIENTS)
def test_requests(replay: Replay, name: str) -> None:
    """Every request is answered as it was when the client was satisfied with the answers."""
    for turn in replay(name):
        assert turn.answer.status_code == turn.exchange["status"], turn.answer.text
        assert turn.answer.status_code == 200


@pytest.mark.parametrize("name", CLIENTS)
def test_turns(main_turns: Replay, name: str) -> None:
    """The conversation has 20 turns with answers."""
    turns = main_turns(name)
    assert len(turns) >= 20
    assert all(turn.prompt for turn in turns)


WITH_TOOLS = [name for name in CLIENTS if name not in WITHOUT_TOOLS]


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_tools(main_turns: Replay, name: str) -> None:
    """Each call of the model arrives whole, and its result is in the next prompt."""
    count = 0
    turns = main_turns(name)
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        calls = [json.loads(found) for found in _CALL.findall(turn.exchange["say"])]
        expected = [(call["name"], call["arguments"]) for call in calls]
        answered = called(turn)
        for (its_name, value), (given, arguments) in zip(answered, expected, strict=True):
            assert its_name == given
            assert value == (arguments["input"] if isinstance(value, str) else arguments)
        count += len(expected)
        if expected and following is not None and name not in HISTORY_AS_TEXT:
            assert json.dumps(expected[0][1])[1:-1] in following.prompt
            behind = following.prompt.rpartition("</tool_call>")[2]
            assert "<|im_start|>tool\n" in behind
    assert count >= 20


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_prefixes(main_turns: Replay, name: str) -> None:
    """Each prompt begins with the one before: the prefix cache has it."""
    turns = main_turns(name)
    for turn, following in itertools.pairwise(turns):
        before = turn.prompt.removesuffix(_ASSISTANT)
        assert following.prompt.startswith(before)


def streams(name: str) -> bool:
    return any(exchange["body"].get("stream") for exchange in load(name) if exchange["body"])


@pytest.mark.parametrize("name", [name for name in CLIENTS if streams(name)])
def test_streams(replay: Replay, name: str) -> None:
    """Streams have more than one event with text, and their API's last event."""
    for turn in replay(name):
        if not (turn.exchange["body"] or {}).get("stream"):
            continue
        events = sse(turn.answer.text)
        last = events[-1][1]
        kind = last if isinstance(last, str) else last["type"]
        assert kind in ("[DONE]", "message_stop", "response.completed", "response.incomplete")
        assert len(events) > 3


KEEPS_REASONING = {
    "ai-sdk-6.0.326-chat",
    "ai-sdk-6.0.326-messages",
    "ai-sdk-6.0.326-responses",
    "claude-code-2.1.330",
    "cline-3.0.65",
    "codex-0.169.0",
    "codex-0.169.0-gpt",
    "langchain-openai-1.7.3-responses",
    "openai-agents-0.24.0",
    "opencode-1.18.33",
    "qwen-code-0.24.4",
}
"""Clients that send the model's reasoning back."""


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_reasoning(main_turns: Replay, name: str) -> None:
    """Reasoning that the client sends back is in the prompt."""
    turns = main_turns(name)
    kept = 0
    for turn, following in itertools.pairwise(turns):
        thought = _THOUGHT.search(turn.exchange["say"])
        assert thought is not None
        kept += thought[1] in following.prompt
    assert kept == (len(turns) - 1 if name in KEEPS_REASONING else 0)


@pytest.mark.parametrize("name", CLIENTS)
def test_ignored_hints(replay: Replay, name: str) -> None:
    """The answers name the hints that they ignore."""
    ignored = {
        hint
        for turn in replay(name)
        for hint in turn.answer.headers.get("quire-ignored", "").split(", ")
    }
    assert ignored - {""} == IGNORED.get(name, set())


@pytest.mark.parametrize("name", OVER_SOCKETS)
def test_websocket(server: Scripted, name: str) -> None:
    """A conversation over a WebSocket: the client sends only new items."""
    engine = server.engine
    assert isinstance(engine, Speaker)
    client = SocketClient(server.url)
    ids: dict[str | None, str | None] = {None: None}
    prompts: list[str] = []
    count = 0
    for exchange in load(name):
        engine.texts[:] = [exchange["say"]]
        body = exchange["body"]
        body.pop("type")
        # The recording names responses and calls of its own server.
        body["previous_response_id"] = ids[body.get("previous_response_id")]
        for item in body["input"]:
            if "call_id" in item:
                item["call_id"] = ids[item["call_id"]]
        events = client.turn(**body)
        assert events[-1]["type"] == "response.completed", events[-1]
        response = events[-1]["response"]
        ids[exchange["id"]] = response["id"]
        prompts.append(engine.heard[-1])
        calls = [json.loads(found) for found in _CALL.findall(exchange["say"])]
        output = [item for item in response["output"] if item["type"] == "function_call"]
        assert [json.loads(item["arguments"]) for item in output] == [
            call["arguments"] for call in calls
        ]
        ids |= dict(zip(exchange["calls"], (item["call_id"] for item in output), strict=True))
        count += len(calls)
    client.close()
    assert count >= 20
    for before, prompt in itertools.pairwise(prompts[1:]):
        assert prompt.startswith(before.removesuffix(_ASSISTANT))


FEATURES = {
    "requests": set(CLIENTS),
    "turns": set(CLIENTS),
    "streams": {name for name in CLIENTS if streams(name)},
    "tools": set(WITH_TOOLS),
    "prefixes": set(WITH_TOOLS),
    "reasoning": KEEPS_REASONING,
}
"""The clients for which each test of this file checks its feature."""


def matrix() -> list[str]:
    """The lines of the matrix in docs/agents.md: each cell names its test."""
    lines = [f"| recording | {' | '.join(FEATURES)} |", f"| --- |{' --- |' * len(FEATURES)}"]
    for name in CLIENTS:
        cells = [f"`test_{test}`" if name in FEATURES[test] else "no" for test in FEATURES]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    for name in OVER_SOCKETS:
        lines.append(f"| `{name}` |{' `test_websocket` |' * len(FEATURES)}")
    return lines


def test_the_matrix_of_the_docs() -> None:
    text = DOCS.read_text("utf-8")
    assert "\n".join(matrix()) in text
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    for name in CLIENTS:
        assert all(f"`{hint}`" in text for hint in IGNORED.get(name, ()))
        version = re.findall(r"-(\d+(?:\.\d+)+)", name)[0]
        assert any(version in heading for heading in headings), name
