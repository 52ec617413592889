"""Server-sent events, and the handling of clients that disconnect."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.server.errors import ApiError, as_api_error
from quire.server.telemetry.metrics import ServerMetrics

T = TypeVar("T")

Writer = Callable[[bytearray, list[T]], None]
"""Appends the bytes of a batch to the buffer."""
ErrorWriter = Callable[[bytearray, ApiError], None]


class EventSource(Protocol[T]):
    """A source of batches for a stream, such as a `TextGeneration` or a `ChatGeneration`."""

    @property
    def start(self) -> Callable[[], None]: ...

    @property
    def ready(self) -> Callable[[], Awaitable[None]]: ...

    @property
    def close(self) -> Callable[[], Awaitable[None]]: ...

    def batches(self) -> AsyncIterator[list[T]]: ...


_encoder = msgspec.json.Encoder()

_PADDED_TO = 32
"""The sizes of padded events are multiples of this number of bytes."""


class ClientDisconnectedError(Exception):
    """The client closed its connection, so no answer can be sent."""


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Awaits `work`, and cancels it if the client disconnects first.

    Args:
        receive: the request's channel, which has delivered the whole body. Its next message is the
            disconnect.

    Raises:
        ClientDisconnectedError: after `work` has been cancelled and has cleaned up.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnectedError
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def write_data(buffer: bytearray, data: bytes) -> None:
    buffer += b"data: " + data + b"\n\n"


def pad_event(data: bytes) -> bytes:
    """Pads a JSON object with random characters.

    Its size then tells an eavesdropper on the encrypted connection less about its text.
    """
    padding = secrets.token_hex(_PADDED_TO)[: _PADDED_TO - len(data) % _PADDED_TO]
    return data[:-1] + f',"obfuscation":"{padding}"}}'.encode()


def write_event(buffer: bytearray, value: Any) -> None:
    buffer += b"data: "
    _encoder.encode_into(value, buffer, -1)
    buffer += b"\n\n"


class EventStream(Response, Generic[T]):
    """Streams the batches of a running source, with one write to the socket per batch.

    Args:
        source: the batches' source, which was started.
        write: appends the bytes of a batch to a buffer.
        finish: appends the last bytes, after all batches.
        fail: appends an error that happens after the headers were sent. The default for events is
            OpenAI's error. Plain text cannot carry an error, so its connection is cut.
        is_long: tells whether a batch is so long that a thread should write it.
    """

    def __init__(
        self,
        source: EventSource[T],
        write: Writer[T],
        finish: Callable[[bytearray], None],
        *,
        metrics: ServerMetrics,
        fail: ErrorWriter | None = None,
        is_long: Callable[[list[T]], bool] | None = None,
        media_type: str = "text/event-stream",
    ) -> None:
        super().__init__(media_type=media_type, headers={"cache-control": "no-cache"})
        # Starlette adds a Content-Length, but the length of a stream is unknown.
        self.raw_headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        self.source = source
        self.write = write
        self.finish = finish
        self.fail = fail or (_write_error if media_type == "text/event-stream" else None)
        self.is_long = is_long or (lambda batch: False)
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._stream(send))
        except ClientDisconnectedError:
            pass
        finally:
            await self.source.close()

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for batch in self.source.batches():
                buffer = bytearray()
                if self.is_long(batch):
                    await asyncio.to_thread(self.write, buffer, batch)
                else:
                    self.write(buffer, batch)
                await send({"type": "http.response.body", "body": bytes(buffer), "more_body": True})
            buffer = bytearray()
            self.finish(buffer)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            api_error = as_api_error(error)
            self.metrics.count_error(api_error)
            if self.fail is None:
                raise
            buffer = bytearray()
            self.fail(buffer, api_error)
        await send({"type": "http.response.body", "body": bytes(buffer), "more_body": False})


def _write_error(buffer: bytearray, error: ApiError) -> None:
    write_event(buffer, error.body)


async def start_stream(request: Request, source: EventSource[Any]) -> None:
    """Starts the source and waits for its first update, while the client stays connected."""
    source.start()
    try:
        await unless_disconnected(request.receive, source.ready())
    except BaseException:
        await source.close()
        raise


def json_response(value: Any) -> Response:
    return Response(_encoder.encode(value), media_type="application/json")
