"""Responses over a WebSocket: `/v1/responses`, upgraded.

Each `response.create` event is a turn. It runs through the application as a request of its own, so
it is authorized, limited, counted and logged as any other. The connection keeps what turns share:
responses, which need not be stored, and the tokens of each conversation.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

import msgspec
from starlette.types import Message, Scope
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketDisconnected

from quire.features.conversation_leases.calls import end_lease
from quire.server.apis.responses.conversation import CONVERSATION_KEY, SocketConversation
from quire.server.apis.responses.events import ResponseWriter
from quire.server.apis.responses.steering import (
    MAX_STEERS,
    Steer,
    SteerError,
    accepted_event,
    failed_event,
    input_items,
    pending_event,
    read_steer,
    required_input,
)
from quire.server.apis.responses.store import StoredResponse
from quire.server.errors import ApiError, ErrorInfo
from quire.server.http.websocket import RESTART, error_event
from quire.server.state import state_of

MAX_STREAMS = 16
"""Most conversations of one connection at once."""
MAX_WAITING = 64
"""Most turns of a stream that wait for the one before them."""
MAX_WAITING_BYTES = 32 * 1024 * 1024
"""Most characters of all turns of a connection that wait."""
SECONDS = 3600.0
"""Seconds for which a connection takes new turns, as at OpenAI."""
_Turns = asyncio.Queue[tuple[dict[str, Any], int] | None]
"""Events that wait, each with its number of characters. None ends the stream."""
CREATE = "response.create"
STEER = "response.steer"
_NOT_SENT = ("stream", "background")
"""Fields of requests that only HTTP has."""


class ResponsesSocket:
    """One connection."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._streams: dict[str | None, _Turns] = {}
        self._conversations: dict[str | None, SocketConversation] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._waiting = 0
        self._gone = asyncio.Event()
        self._ends = asyncio.get_running_loop().time() + SECONDS

    async def run(self) -> None:
        await self._websocket.accept()
        stops = False
        try:
            while not self._gone.is_set():
                text = await self._websocket.receive_text()
                await self._take(text)
        except WebSocketDisconnect as end:
            # The server stops: running turns may end. A client that is gone needs no answers.
            stops = end.code == RESTART
        except KeyError:
            await self._websocket.close(1003, "messages are text")
        finally:
            if not stops:
                self._gone.set()
            for queue in self._streams.values():
                queue.put_nowait(None)
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if stops:
            await self._websocket.close(RESTART, "the server stops")

    async def _take(self, text: str) -> None:
        """Reads an event of the client, and queues its turn or its steering input."""
        stream: str | None = None
        try:
            event = _decode(text)
            if event.pop("type") == STEER:
                await self._steer(event, len(text))
                return
            stream = _stream_of(event)
            if asyncio.get_running_loop().time() > self._ends:
                raise ApiError(
                    400,
                    "The connection is older than 60 minutes: open another one.",
                    code="websocket_connection_limit_reached",
                )
            queue = self._queue(stream)
            full = self._waiting + len(text) > MAX_WAITING_BYTES and self._waiting > 0
            if full or queue.qsize() >= MAX_WAITING:
                raise ApiError(
                    429,
                    f"Too many turns wait for the one before them: at most {MAX_WAITING} of a "
                    f"stream, and {MAX_WAITING_BYTES} characters of a connection, may.",
                    code="rate_limit_exceeded",
                )
            self._waiting += len(text)
            queue.put_nowait((event, len(text)))
        except ApiError as error:
            await self._fail(error.status, error.body.error, stream)

    def _queue(self, stream: str | None) -> _Turns:
        queue = self._streams.get(stream)
        if queue is None:
            if len(self._streams) >= MAX_STREAMS:
                raise ApiError(
                    400,
                    f"A connection has at most {MAX_STREAMS} values of 'stream_id'.",
                    param="stream_id",
                )
            queue = self._streams[stream] = asyncio.Queue()
            conversation = self._conversations[stream] = SocketConversation(self._responses)
            self._tasks.append(asyncio.create_task(self._run_stream(stream, queue, conversation)))
        return queue

    async def _run_stream(
        self, stream: str | None, queue: _Turns, conversation: SocketConversation
    ) -> None:
        try:
            while (turn := await queue.get()) is not None and not self._gone.is_set():
                event, size = turn
                self._waiting -= size
                await self._turn_and_successors(event, stream, conversation)
        finally:
            await end_lease(state_of(self._websocket).client, conversation.id)

    async def _turn_and_successors(
        self, event: dict[str, Any], stream: str | None, conversation: SocketConversation
    ) -> None:
        """Runs a turn, and those that steering input adds to it.

        A turn begins with the steering input that its previous response holds.
        """
        named = event.get("previous_response_id")
        previous = named if isinstance(named, str) else ""
        held = conversation.held.get(previous, [])
        if held:
            items = [item for steer in held for item in steer.items]
            event = {**event, "input": items + input_items(event.get("input", []))}
        error = await self._turn(event, stream, conversation)
        if error is not None:
            await self.send(error, stream)
        elif held:
            del conversation.held[previous]
        while steers := conversation.take_steers():
            assert conversation.active is not None
            writer = conversation.active.writer
            needed = required_input(writer.response)
            if writer.response.status not in ("completed", "incomplete"):
                reason = SteerError("response_not_active", "The response has failed.")
                await self._give_back(steers, reason, writer, stream)
            elif needed:
                conversation.hold(writer.response.id, steers)
                for steer in steers:
                    await self.send(pending_event(steer, writer.take_number(), needed), stream)
            else:
                items = [item for steer in steers for item in steer.items]
                event = {**event, "previous_response_id": writer.response.id, "input": items}
                error = await self._turn(event, stream, conversation)
                if error is not None:
                    reason = SteerError("successor_creation_failed", _message_of(error))
                    await self._give_back(steers, reason, writer, stream)

    async def _steer(self, event: dict[str, Any], size: int) -> None:
        """Takes steering input for a response that runs, and tells the client."""
        parent = event.get("previous_response_id")
        found = ((s, c) for s, c in self._conversations.items() if c.active_id == parent)
        stream, conversation = next(found, (None, None))
        writer = None if conversation is None else conversation.active_writer
        try:
            steer = read_steer(event, size)
            self._check_steerable(steer, conversation)
        except SteerError as error:
            number = 0 if writer is None else writer.take_number()
            shown = {"previous_response_id": parent, "input": event.get("input")}
            await self.send(failed_event(error, number, shown), stream)
            return
        assert conversation is not None
        assert writer is not None
        conversation.steers.append(steer)
        await self.send(accepted_event(steer, writer.take_number()), stream)

    def _check_steerable(self, steer: Steer, conversation: SocketConversation | None) -> None:
        """Raises SteerError if a response takes no steering input."""
        if conversation is None:
            if steer.parent in self._responses:
                raise SteerError("response_already_completed", "The response has ended.")
            raise SteerError(
                "response_not_found",
                f"No response {steer.parent[:200]!r} runs on this connection.",
            )
        assert conversation.active is not None
        if not conversation.active.running:
            raise SteerError("response_already_completed", "The response has ended.")
        if not conversation.generate:
            raise SteerError("steering_not_supported", "'generate' is false: nothing is generated.")
        waiting = sum(each.steer_size for each in self._conversations.values())
        full = waiting + steer.size > MAX_WAITING_BYTES and waiting > 0
        if full or len(conversation.steers) >= MAX_STEERS:
            raise SteerError(
                "too_many_pending_steers",
                f"Too much steering input waits: at most {MAX_STEERS} inputs for a response, and "
                f"{MAX_WAITING_BYTES} characters of a connection, may.",
            )

    async def _give_back(
        self, steers: list[Steer], error: SteerError, writer: ResponseWriter, stream: str | None
    ) -> None:
        """Tells the client that steering input was not used."""
        for steer in steers:
            shown = {
                "id": steer.id, "previous_response_id": steer.parent, "input": steer.given,
            }  # fmt: skip
            await self.send(failed_event(error, writer.take_number(), shown), stream)

    async def _turn(
        self, event: dict[str, Any], stream: str | None, conversation: SocketConversation
    ) -> bytes | None:
        """Runs one turn through the application. Returns the event of its error, if it failed."""
        fields = {name: value for name, value in event.items() if name not in _NOT_SENT}
        generate = fields.pop("generate", None)
        conversation.generate = generate is not False
        if event.get("background"):
            error = ErrorInfo(
                "'background' is not available over a WebSocket.", "invalid_request_error",
                "background",
            )  # fmt: skip
            return error_event(400, error)
        body = msgspec.json.encode({**fields, "stream": True})
        parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        sender = _TurnSender(self, stream)

        async def receive() -> Message:
            if parts:
                return parts.pop()
            await self._gone.wait()
            return {"type": "http.disconnect"}

        scope = _http_scope(self._websocket.scope, len(body))
        scope[CONVERSATION_KEY] = conversation
        await self._websocket.app(scope, receive, sender.send)
        return sender.error

    async def send(self, data: bytes, stream: str | None) -> None:
        """Sends one event, given as JSON."""
        if stream is not None:
            data = data[:-1] + b',"stream_id":' + msgspec.json.encode(stream) + b"}"
        if self._gone.is_set():
            return
        try:
            await self._websocket.send_text(data.decode())
        except (WebSocketDisconnect, WebSocketDisconnected):
            self._gone.set()

    async def _fail(self, status: int, error: ErrorInfo, stream: str | None) -> None:
        await self.send(error_event(status, error), stream)


class _TurnSender:
    """Sends the application's answer to one turn as events.

    A turn's stream has one event per line. Any other answer is an error.
    """

    def __init__(self, socket: ResponsesSocket, stream: str | None) -> None:
        self._socket = socket
        self._stream = stream
        self._status = 0
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif self._status == 200:
            for line in message.get("body", b"").splitlines():
                await self._socket.send(line, self._stream)
        else:
            self._body += message.get("body", b"")

    @property
    def error(self) -> bytes | None:
        """The event of an answer that is an error."""
        if self._status in (0, 200):
            return None
        head = f'{{"type":"error","status":{self._status},'.encode()
        return head + bytes(self._body[1:])


def _http_scope(scope: Scope, length: int) -> Scope:
    """Returns the scope of a turn's request, with the headers of the handshake."""
    dropped = (b"connection", b"upgrade", b"content-length", b"content-type", b"x-request-id")
    headers = [
        (name, value) for name, value in scope["headers"]
        if name not in dropped and not name.startswith(b"sec-websocket-")
    ]  # fmt: skip
    headers += [
        (b"content-type", b"application/json"),
        (b"content-length", str(length).encode()),
    ]
    kept = ("asgi", "http_version", "server", "client", "root_path", "path", "raw_path")
    return {
        **{name: scope[name] for name in kept if name in scope},
        "type": "http",
        "method": "POST",
        "scheme": "https" if scope["scheme"] == "wss" else "http",
        "query_string": b"",
        "headers": headers,
        "state": dict(scope.get("state", ())),
    }


def _decode(text: str) -> dict[str, Any]:
    try:
        event = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise ApiError(400, "The message is not valid JSON.", code="invalid_json") from None
    if not isinstance(event, dict) or event.get("type") not in (CREATE, STEER):
        raise ApiError(
            400,
            f"Only events of type '{CREATE}' and '{STEER}' are supported.",
            param="type",
            code="unsupported_event",
        )
    return event


def _message_of(error: bytes) -> str:
    return str(msgspec.json.decode(error)["error"]["message"])


def _stream_of(event: dict[str, Any]) -> str | None:
    stream = event.pop("stream_id", None)
    if stream is not None and not (isinstance(stream, str) and 0 < len(stream) <= 256):
        raise ApiError(400, "'stream_id' must be a text of 1 to 256 characters.", param="stream_id")
    return stream


async def responses_socket(websocket: WebSocket) -> None:
    await ResponsesSocket(websocket).run()
