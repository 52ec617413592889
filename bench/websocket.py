"""Time outside of the model in a conversation with tools: HTTP beside a WebSocket.

    python -m bench.websocket --turns 20 --prompt-words 6000

A scripted engine answers at once, so that all the time is the client's, the transport's and the
server's. Each turn calls a tool. Over HTTP the client sends the whole history, as agents do, or
`previous_response_id`; over the WebSocket it sends the new item.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quire.engine.loop.output import CompletionUpdate
from quire.sampling_params import SamplingParams
from quire.server.args import ServerArgs
from quire.server.process.uvicorn_server import BoundedHttpProtocol
from quire.text.tokenizer import Tokenizer
from tests.server.scripted import MODEL, TEMPLATE, Scripted, Speaker, serve
from tests.server.socket_client import SocketClient

Turn = Callable[[list[Any], list[Any], str | None], dict[str, Any]]
"""Sends one turn (history, new items, the last response's id), and returns the response."""


def words(count: int, seed: int) -> str:
    chance = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return " ".join("".join(chance.choices(letters, k=chance.randint(2, 8))) for _ in range(count))


def tools(count: int) -> list[dict[str, Any]]:
    text = {"type": "string", "description": words(20, 1)}
    return [
        {
            "type": "function",
            "name": f"tool_{number}",
            "description": words(80, number),
            "parameters": {
                "type": "object",
                "properties": {"path": text, "pattern": text, "limit": {"type": "integer"}},
                "required": ["path"],
            },
        }
        for number in range(count)
    ]


class InstantEngine(Speaker):
    """Answers at once, and leaves the prompt alone."""

    async def generate(
        self, prompt: Any, params: SamplingParams, *, request_id: str, **_: Any
    ) -> AsyncIterator[CompletionUpdate]:
        self.prompt_tokens = len(prompt)
        ids = self.tokenizer.encode(self.texts.pop(0), add_special_tokens=False).tolist()
        for place, token in enumerate(ids):
            last = place == len(ids) - 1
            yield CompletionUpdate(
                0,
                self.tokenizer.token_text(token),
                [token],
                finish_reason="stop" if last else None,
                prompt_token_ids=prompt if place == 0 else None,
            )


class HttpTurns:
    """Turns over one kept connection. `stored` names the last response instead of the history."""

    def __init__(self, server: Scripted, fields: dict[str, Any], stored: bool) -> None:
        parts = urlsplit(server.url)
        self.connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
        self.fields = fields
        self.stored = stored

    def turn(self, history: list[Any], new: list[Any], previous: str | None) -> dict[str, Any]:
        body = {**self.fields, "stream": True, "input": history, "store": self.stored}
        if self.stored:
            body |= {"input": new, "previous_response_id": previous}
        headers = {"Content-Type": "application/json"}
        self.connection.request("POST", "/v1/responses", json.dumps(body), headers)
        answer = self.connection.getresponse()
        assert answer.status == 200, answer.read()
        events = [line[6:] for line in answer.read().split(b"\n") if line.startswith(b"data: ")]
        found: dict[str, Any] = [json.loads(event) for event in events][-1]["response"]
        return found


class SocketTurns:
    def __init__(self, server: Scripted, fields: dict[str, Any]) -> None:
        self.client = SocketClient(server.url)
        self.fields = fields

    def turn(self, history: list[Any], new: list[Any], previous: str | None) -> dict[str, Any]:
        events = self.client.turn(
            **self.fields, input=new, previous_response_id=previous, store=False
        )
        found: dict[str, Any] = events[-1]["response"]
        return found


def converse(engine: InstantEngine, turn: Turn, turns: int, result_words: int) -> list[float]:
    """Returns the seconds of each turn."""
    new: list[Any] = [{"role": "user", "content": "Look at all files."}]
    history, previous, seconds = list(new), None, []
    for number in range(turns):
        arguments = json.dumps({"path": f"file_{number}.py", "limit": number})
        engine.texts[:] = [
            f'<tool_call>{{"name": "tool_{number % 8}", "arguments": {arguments}}}</tool_call>'
        ]
        began = time.perf_counter()
        response = turn(history, new, previous)
        seconds.append(time.perf_counter() - began)
        (call,) = response["output"]
        assert json.loads(call["arguments"])["limit"] == number
        output = words(result_words, 1000 + number)
        new = [{"type": "function_call_output", "call_id": call["call_id"], "output": output}]
        history += [call, *new]
        previous = response["id"]
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--prompt-words", type=int, default=6000, help="words of the instructions")
    parser.add_argument("--result-words", type=int, default=400, help="words of a tool's result")
    parser.add_argument("--tools", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokenizer", type=Path, help="folder; by default the embedded model's")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    engine = InstantEngine()
    if args.tokenizer is not None:
        engine.tokenizer = Tokenizer.from_path(args.tokenizer)
        engine.tokenizer.use_template(TEMPLATE)
    engine.config.scheduler.max_model_len = 1_000_000
    fields: dict[str, Any] = {
        "model": MODEL, "instructions": words(args.prompt_words, 0), "tools": tools(args.tools)
    }  # fmt: skip
    results: dict[str, list[list[float]]] = {"http": [], "http stored": [], "websocket": []}
    settings = ServerArgs(generation_config="none")
    with serve(engine, settings, http=BoundedHttpProtocol) as server:
        for _ in range(args.repeats):
            for name, runs in results.items():
                if name == "websocket":
                    turn = SocketTurns(server, fields).turn
                else:
                    turn = HttpTurns(server, fields, name == "http stored").turn
                runs.append(converse(engine, turn, args.turns, args.result_words))
    tokens = engine.prompt_tokens
    totals = {name: min(map(sum, runs)) for name, runs in results.items()}
    print(f"{args.turns} turns, {tokens} tokens in the last prompt")
    for name, runs in results.items():
        last = statistics.median(run[-1] for run in runs)
        share = totals[name] / totals["http"]
        print(
            f"{name:12} {totals[name] * 1e3:8.1f} ms, last turn {last * 1e3:6.1f} ms, {share:.0%}"
        )
    if args.json is not None:
        args.json.write_text(json.dumps({"tokens": tokens, "seconds": results}))


if __name__ == "__main__":
    main()
