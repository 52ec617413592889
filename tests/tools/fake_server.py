"""A server with OpenAI's API, without a model; correct except for the faults that a test names."""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

MODEL = "fake"
KEY = "secret"
WORDS = [" one", " two", " three", " four,", " five", " six", " seven", ".", " eight", " nine"]
SCHEMA_ANSWER = ['{"animal": "fox",', ' "legs": 4,', ' "awake": true}']
ADVICE = {"max_tokens": "; use 'max_completion_tokens' instead"}

Json = dict[str, Any]


class RefusedError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class FakeServer(ThreadingHTTPServer):
    """Counts words as tokens.

    Attributes:
        faults: names of the faults.
        refused: fields and routes that are refused.
    """

    daemon_threads = True

    def __init__(self, faults: tuple[str, ...], refused: tuple[str, ...]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults = faults
        self.refused = refused
        self.requests = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


@contextmanager
def serve(*faults: str, refused: tuple[str, ...] = ()) -> Iterator[FakeServer]:
    server = FakeServer(faults, refused)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


class Handler(BaseHTTPRequestHandler):
    server: FakeServer
    ROUTES: ClassVar = {"/v1/chat/completions": True, "/v1/completions": False}

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def has(self, fault: str) -> bool:
        return fault in self.server.faults

    def do_GET(self) -> None:
        if self.has("key") and self.headers["Authorization"] != f"Bearer {KEY}":
            self.reply(401, {"error": {"message": "wrong key"}})
            return
        self.reply(200, {"data": [] if self.has("no models") else [{"id": MODEL}]})

    def do_POST(self) -> None:
        self.server.requests += 1
        data = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            body = self.checked(data)
        except RefusedError as error:
            silent = self.has("silent errors")
            self.reply(error.status, {} if silent else {"error": {"message": str(error)}})
            return
        chat = self.ROUTES[self.path]
        choices = [self.completion(body, index) for index in range(body.get("n") or 1)]
        if self.has("one choice"):
            choices = choices[:1]
        prompt = json.dumps(body["messages"] if chat else body["prompt"]).split()
        completion = sum(len(tokens) for tokens, _ in choices)
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": completion,
            "total_tokens": len(prompt) + completion + self.has("total"),
        }
        if body.get("stream"):
            self.stream(body, chat, choices, usage)
            return
        whole = [
            self.choice(body, chat, index, tokens, end, "message")
            for index, (tokens, end) in enumerate(choices)
        ]
        self.reply(200, {"choices": whole, "usage": usage})

    def checked(self, data: bytes) -> Json:
        if self.path in self.server.refused or self.path not in self.ROUTES:
            raise RefusedError(404, "no such route")
        if self.has("down"):
            raise RefusedError(500, "down")
        if self.has("key") and self.headers["Authorization"] != f"Bearer {KEY}":
            raise RefusedError(401, "wrong key")
        try:
            body = json.loads(data)
        except ValueError:
            raise RefusedError(400, "no JSON") from None
        if body["model"] != MODEL and not self.has("any model"):
            raise RefusedError(404, "no such model")
        for field in self.server.refused:
            if field in body:
                raise RefusedError(400, f"'{field}' is not supported{ADVICE.get(field, '')}")
        limit = body.get("max_tokens", body.get("max_completion_tokens"))
        wrong = body["temperature"] < 0 or not isinstance(limit, int)
        if wrong and not self.has("any parameter"):
            raise RefusedError(422 if self.has("422") else 400, "wrong parameter")
        return body

    def completion(self, body: Json, index: int) -> tuple[list[str], str]:
        """Returns the tokens and the finish reason."""
        limit = body.get("max_tokens", body.get("max_completion_tokens"))
        if not isinstance(limit, int):
            limit = 1
        if body.get("response_format") and not self.has("schema"):
            return SCHEMA_ANSWER, "stop"
        draw = random.Random(0)
        if body["temperature"] > 0 or self.has("greedy"):
            seed = None if self.has("seed") else body.get("seed")
            if self.has("one sample"):
                seed, index = 0, 0
            draw = random.Random(None if seed is None else seed + index)
        tokens = draw.choices(WORDS, k=60)
        stops = [] if self.has("stop") else body.get("stop") or []
        text = "".join(tokens[:limit])
        cut = min((text.find(stop) for stop in stops if stop in text), default=None)
        if cut is None:
            return tokens[: limit + self.has("max_tokens")], "length"
        if self.has("stop kept"):
            cut += len(stops[0])
        kept, length = [], 0
        while length < cut:
            kept.append(tokens[len(kept)][: cut - length])
            length += len(kept[-1])
        return kept, "length" if self.has("stop reason") else "stop"

    def choice(
        self, body: Json, chat: bool, index: int, tokens: list[str], end: str | None, place: str
    ) -> Json:
        text = "".join(tokens)
        shown: Json = {place: {"role": "assistant", "content": text}} if chat else {"text": text}
        asked = body.get("logprobs")
        return {
            "index": index,
            "finish_reason": end,
            "logprobs": (self.chat_logprobs if chat else self.logprobs)(tokens) if asked else None,
            **shown,
        }

    def top(self, token: str) -> list[tuple[str, float]]:
        best = 0.2 if self.has("not the top") else 0.8 if self.has("mass") else 0.6
        found = [(token, math.log(best)), ("x", math.log(0.3)), ("y", math.log(0.05))]
        return found[::-1] if self.has("order") else found

    def chat_logprobs(self, tokens: list[str]) -> Json:
        entries = []
        for token in tokens[self.has("few logprobs") * 3 :]:
            own = next(value for name, value in self.top(token) if name == token)
            tops = [{"token": name, "logprob": value} for name, value in self.top(token)]
            data = list(token.encode())
            entries.append({"token": token, "logprob": own, "bytes": data, "top_logprobs": tops})
        return {"content": entries}

    def logprobs(self, tokens: list[str]) -> Json:
        tokens = tokens[self.has("few logprobs") * 3 :]
        tops = [dict(self.top(token)) for token in tokens]
        own = [top[token] for token, top in zip(tokens, tops, strict=True)]
        return {"tokens": tokens, "token_logprobs": own, "top_logprobs": tops}

    def stream(
        self, body: Json, chat: bool, choices: list[tuple[list[str], str]], usage: Json
    ) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for index, (tokens, end) in enumerate(choices):
            shown = tokens[: -1 if self.has("stream") and len(tokens) > 1 else None]
            for token in shown:
                self.event({"choices": [self.choice(body, chat, index, [token], None, "delta")]})
            ending = "stop" if self.has("stream end") else end
            self.event({"choices": [self.choice(body, chat, index, [], ending, "delta")]})
        if body.get("stream_options") and not self.has("no stream usage"):
            extra = int(self.has("stream usage"))
            usage = {**usage, "completion_tokens": usage["completion_tokens"] + extra}
            self.event({"choices": [], "usage": usage})
        while self.has("endless"):
            self.wfile.write(b": more\n\n" * 10_000)
        if not self.has("no done"):
            self.wfile.write(b"data: [DONE]\n\n")

    def event(self, value: Json) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    def reply(self, status: int, value: Json) -> None:
        if self.has("usage list") and "usage" in value:
            value = {**value, "usage": [1]}
        data = b"[" if self.has("no JSON") else json.dumps(value).encode()
        if self.has("nested") and "choices" in value:
            data = b"[" * 100_000
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
