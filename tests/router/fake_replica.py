"""Fake servers in a test's event loop. The test decides what they answer and when they die."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import uvicorn
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from quire.features.kv_events.messages import KVEventLine
from quire.features.kv_events.prompt_report import PROMPT_HEADER
from quire.router.proxy import with_headers
from quire.server.context.api_keys import digest_of
from quire.server.http.replica_proofs import (
    CHALLENGE_HEADER,
    PROOF_HEADER,
    TAG_HEADER,
    prove,
    tag_in,
)
from quire.server.http.websocket import WEBSOCKETS


@dataclass
class FakeReplica:
    """A fake server with one model.

    Attributes:
        status: status of its answers to requests.
        parts: parts of the answers' bodies; all but the first wait for `gate`.
        stored: ids of its stored answers.
        peers: the router's last list of peers.
        events: events to send.
        report: report about each prompt.
        nonsense: its answer to the router's questions.
        headers: headers of its answers.
        answers_late: number of further health checks to let time out.
        frozen: whether it keeps its connections, but sends nothing.
        key: the key to require and to prove.
        waits: whether a turn of a WebSocket waits for `gate` before its end.
        turns: the events of its WebSockets' clients.
        sockets: headers of the handshakes of its WebSockets.
        open: number of its open WebSockets.
        other_place: whether it proves the key for another address, as a relay would.
        keys_seen: the received keys.
    """

    name: str = "fake"
    checkpoint: str = "a"
    status: int = 200
    ready: bool = True
    running: int = 0
    parts: tuple[bytes, ...] = (b"one", b" two")
    stored: tuple[str, ...] = ()
    seen: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    left: int = 0
    peers: list[str] = field(default_factory=list)
    events: asyncio.Queue[KVEventLine | None] | None = None
    report: bytes = b""
    nonsense: bytes | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()
    answers_late: int = 0
    frozen: bool = False
    key: str | None = None
    other_place: bool = False
    keys_seen: list[str] = field(default_factory=list)
    waits: bool = False
    turns: list[dict[str, Any]] = field(default_factory=list)
    sockets: list[dict[str, str]] = field(default_factory=list)
    open: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    server: Any = None
    url: str = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        if scope["type"] == "websocket":
            await self._converse(WebSocket(scope, receive, send))
            return
        if (tag := tag_in(scope["headers"])) is not None:
            send = with_headers(send, [(TAG_HEADER, tag)])
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        while self.frozen:
            await asyncio.sleep(0.01)
        if path == "/ready":
            send = self._proving(scope, send)
            if self.answers_late:
                self.answers_late -= 1
                await asyncio.sleep(0.5)
            await _answer(send, 200 if self.ready else 503, b"")
        elif self.nonsense is not None and path in (
            "/v1/models",
            "/load",
            "/kv/events",
            "/kv/peers",
        ):
            await _answer(send, 200, self.nonsense)
        elif not self._may_ask(scope):
            await _answer(send, 401, b"")
        elif path == "/v1/models":
            await _answer(send, 200, json.dumps({"data": [{"id": self.name}]}).encode())
        elif path == "/load":
            load: dict[str, Any] = {"running": self.running, "waiting": 0, "kv_tokens": 1 << 20}
            load["checkpoint"] = self.checkpoint
            await _answer(send, 200, json.dumps(load).encode())
        elif path == "/kv/events":
            await self._events(send)
        elif path == "/kv/peers":
            self.peers = json.loads(body)["peers"]
            await _answer(send, 200, body)
        else:
            headers = {name.decode(): value.decode() for name, value in scope["headers"]}
            target = path + ("?" + scope["query_string"].decode() if scope["query_string"] else "")
            self.seen.append((scope["method"], target, headers, body))
            missing = path.startswith("/v1/responses/") and path.split("/")[3] not in self.stored
            if missing or self.status != 200:
                await _answer(send, 404 if missing else self.status, b"refused")
            else:
                await self._stream(receive, send)

    def _proving(self, scope: Any, send: Any) -> Any:
        """Returns a `send` that adds a proof of the key if the router asks for one."""
        host, port = scope["server"]
        challenge = dict(scope["headers"]).get(CHALLENGE_HEADER, b"")
        digests = [] if self.key is None else [digest_of(self.key.encode())]
        proof = prove(challenge, digests, (host, port + self.other_place))
        return send if proof is None else with_headers(send, [(PROOF_HEADER, proof)])

    def _may_ask(self, scope: Any) -> bool:
        sent = dict(scope["headers"]).get(b"authorization")
        if sent is not None:
            self.keys_seen.append(sent.decode())
        return self.key is None or sent == f"Bearer {self.key}".encode()

    async def _events(self, send: Any) -> None:
        """Sends the lines that the test puts into `events`; answers 404 without `events`."""
        if self.events is None:
            await _answer(send, 404, b"")
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (line := await self.events.get()) is not None:
            data = msgspec.json.encode(line) + b"\n"
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _converse(self, websocket: WebSocket) -> None:
        """Answers each turn with its own fields."""
        if self.status != 200:
            await websocket.send_denial_response(Response(b"refused", self.status))
            return
        self.sockets.append(dict(websocket.headers))
        await websocket.accept()
        self.open += 1
        with contextlib.suppress(WebSocketDisconnect):
            while True:
                event = await websocket.receive_json()
                self.turns.append(event)
                previous = event.get("previous_response_id")
                if previous is not None and previous not in self.stored:
                    error = {"code": "previous_response_not_found"}
                    await websocket.send_json({"type": "error", "status": 400, "error": error})
                    continue
                created = {"type": "response.created", "response": {"id": "r", "echo": event}}
                await websocket.send_json(created)
                if self.waits:
                    await self.gate.wait()
                usage = {"total_tokens": 10}
                completed = {"type": "response.completed", "response": {"usage": usage}}
                await websocket.send_json(completed)
        self.open -= 1

    async def _stream(self, receive: Any, send: Any) -> None:
        leaving = asyncio.create_task(receive())
        headers = [
            (b"content-type", b"text/event-stream"),
            *(self.headers or [(b"x-own", b"kept")]),
        ]
        if self.report:
            headers.append((PROMPT_HEADER, self.report))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for index, part in enumerate(self.parts):
            if index:
                waiting = asyncio.create_task(self.gate.wait())
                await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if leaving.done():
                    self.left += 1
                    return
            await send({"type": "http.response.body", "body": part, "more_body": True})
        leaving.cancel()
        await send({"type": "http.response.body", "body": b""})

    def die(self) -> None:
        """Ends all connections, and accepts no more."""
        for listener in self.server.servers:
            listener.close()
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()


async def _answer(send: Any, status: int, body: bytes) -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def serving(app: Any, servers: list[uvicorn.Server] | None = None) -> AsyncIterator[str]:
    """Serves an application on a free port; yields the address.

    Args:
        servers: gets the server.
    """
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, loop="none", lifespan="off", log_config=None, log_level="critical",
        timeout_graceful_shutdown=1, **WEBSOCKETS,
    )  # fmt: skip
    config.load()
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    running = asyncio.create_task(server.serve(sockets=[sock]))
    if servers is not None:
        servers.append(server)
    if isinstance(app, FakeReplica):
        app.server = server
        app.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        await running
