"""Records what a client sends in a conversation with tools: a scripted model, real requests.

    python -m tests.server.agents.record NAME-VERSION --say SCRIPT.json COMMAND...

In the command, `{url}` is the server's address. SCRIPT.json lists what the model says to requests
that have tools, one text per request; other requests, such as those for titles, get "Tools.".
"""

from __future__ import annotations

import argparse
import json
import lzma
import subprocess
import sys
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.args import ServerArgs
from quire.server.process.uvicorn_server import BoundedHttpProtocol
from tests.server.scripted import Speaker, serve

RECORDINGS = Path(__file__).parent
LONGEST = 300
"""Characters above which texts are shortened by default: mostly system prompts."""
SHORT = 120
HEADERS = ("accept", "content-type", "user-agent", "anthropic-version", "anthropic-beta", "x-app",
           "originator", "x-stainless-helper", "openai-beta")  # fmt: skip
OTHER = "Tools."


class Recorder:
    """Middleware that keeps a client's requests, and what the model says to each."""

    def __init__(
        self, app: ASGIApp, engine: Speaker, says: list[str], every: bool, longest: int
    ) -> None:
        self.app = app
        self.engine = engine
        self.says = says
        self.every = every
        self.longest = longest
        self.exchanges: list[dict[str, Any]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._record_socket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        parts: list[bytes] = []
        messages: list[Message] = []
        while True:
            message = await receive()
            messages.append(message)
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                break
        raw = b"".join(parts)
        body = json.loads(raw) if raw.startswith(b"{") else None
        text, answer = "", bytearray()
        generates = scope["method"] == "POST" and "count_tokens" not in scope["path"]
        if generates and body is not None:
            scripted = self.every or body.get("tools")
            text = (self.says.pop(0) if self.says else "Done.") if scripted else OTHER
            self.engine.texts[:] = [text]
        status = 0

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        async def watch(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            if status >= 400:
                answer.extend(message.get("body", b""))
            await send(message)

        await self.app(scope, replay, watch)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        query = f"?{scope['query_string'].decode()}" if scope["query_string"] else ""
        print(scope["method"], scope["path"] + query, status, bytes(answer[:500]), file=sys.stderr)
        self.exchanges.append(
            {
                "method": scope["method"],
                "path": scope["path"] + query,
                "headers": {name: headers[name] for name in HEADERS if name in headers},
                "body": shortened(body, self.longest),
                "say": text,
                "status": status,
            }
        )

    async def _record_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Keeps the events that the client sends over a WebSocket, each with its response's id."""

        async def watch_events() -> Message:
            message = await receive()
            if message.get("text"):
                event = json.loads(message["text"])
                text = OTHER if event.get("generate") is False else self.says.pop(0)
                self.engine.texts[:] = [text]
                body = shortened(event, self.longest)
                self.exchanges.append({"body": body, "say": text, "id": ""})
            return message

        async def watch_answers(message: Message) -> None:
            if message["type"] == "websocket.send":
                event = json.loads(message["text"])
                if event["type"] == "response.completed":
                    output = event["response"]["output"]
                    calls = [item["call_id"] for item in output if "call_id" in item]
                    self.exchanges[-1] |= {"id": event["response"]["id"], "calls": calls}
                elif event["type"] == "error":
                    print(event, file=sys.stderr)
            await send(message)

        await self.app(scope, watch_events, watch_answers)


def shortened(value: Any, longest: int) -> Any:
    """The body with shorter texts. Grammars and arguments of calls stay."""
    if isinstance(value, dict):
        kept = ("definition", "arguments", "input", "encrypted_content", "signature")
        return {
            key: inner if key in kept and isinstance(inner, str) else shortened(inner, longest)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [shortened(inner, longest) for inner in value]
    if isinstance(value, str) and len(value) > longest:
        return f"{value[:SHORT]}..."
    return value


def path_of(name: str) -> Path:
    return RECORDINGS / f"{name}.jsonl.xz"


def save(name: str, exchanges: list[dict[str, Any]]) -> None:
    lines = "".join(f"{json.dumps(exchange)}\n" for exchange in exchanges)
    path_of(name).write_bytes(lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME))


def load(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lzma.decompress(path_of(name).read_bytes()).splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--say", type=Path, required=True)
    parser.add_argument("--cwd", type=Path)
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--every", action="store_true", help="requests without tools count too")
    parser.add_argument("--longest", type=int, default=LONGEST, help="shorten longer texts")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    engine = Speaker()
    engine.config.scheduler.max_model_len = 200_000
    recorders: list[Recorder] = []

    def record(app: ASGIApp) -> ASGIApp:
        says = json.loads(args.say.read_text("utf-8"))
        recorders.append(Recorder(app, engine, says, args.every, args.longest))
        return recorders[0]

    names = tuple(args.model) or ("*",)
    server_args = ServerArgs(generation_config="none", served_model_name=names)
    with serve(engine, server_args, record, http=BoundedHttpProtocol) as server:
        command = [part.replace("{url}", server.url) for part in args.command]
        done = subprocess.run(command, cwd=args.cwd, stdin=subprocess.DEVNULL, timeout=540)
    save(args.name, recorders[0].exchanges)
    print(f"{len(recorders[0].exchanges)} requests, exit status {done.returncode}")


if __name__ == "__main__":
    main()
