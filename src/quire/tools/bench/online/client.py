"""One process of the load generator, which sends its share of the requests and times the answers.

`python -m quire.tools.bench.online.client` prints "ready", reads a `ClientLoad` from standard input
and writes `Answers` to standard output. One process can receive about ten thousand tokens per
second because it does little: the bodies are complete, and only the last events of a stream are
parsed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import sys
import time
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec
import numpy as np

_CONNECT_SECONDS = 30.0


Times = np.ndarray[Any, np.dtype[np.float64]]


class ClientLoad(msgspec.Struct):
    """The requests that one process sends.

    Attributes:
        url: URL of the endpoint.
        headers: headers of each request.
        bodies: bodies of the requests.
        concurrency: most requests at once; 0 is no limit.
        begin: time to start, on the monotonic clock.
        send_at: seconds after `begin` for each body; None sends as fast as `concurrency` allows.
        timeout: time limit of a request, in seconds.
    """

    url: str
    headers: dict[str, str]
    bodies: list[bytes]
    concurrency: int
    begin: float
    send_at: list[float] | None = None
    timeout: float = 600.0


class Answer(msgspec.Struct):
    """The result of a request. Times are seconds on the monotonic clock, the same in all processes.

    Attributes:
        index: index of the body.
        sent: when the request was sent.
        ended: when the answer ended.
        events: times of the stream's events that have choices, float64 as bytes.
        prompt_tokens: prompt tokens in the answer's `usage`.
        output_tokens: generated tokens in the answer's `usage`.
        cached_tokens: cached prompt tokens in the answer's `usage`.
        error: a description of the failure, or "".
    """

    index: int
    sent: float
    ended: float = 0.0
    events: bytes = b""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""

    @property
    def times(self) -> Times:
        return np.frombuffer(self.events)


class Answers(msgspec.Struct):
    """The answers of one process.

    Attributes:
        answers: the answers, in the order in which they ended.
        cpu: fraction of a core that the process used.
    """

    answers: list[Answer]
    cpu: float


class HttpConnection(asyncio.Protocol):
    """Sends one request at a time, as long as the server keeps the connection open."""

    def __init__(self) -> None:
        self.open = False
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._clear()

    def _clear(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._tail = b""
        self.times: list[float] = []
        self.usage: dict[str, Any] = {}
        self.problem = b""
        self.finished = False

    async def ask(self, request: bytes, timeout: float) -> None:
        """Sends a request and waits until its answer is complete. Raises OSError or
        TimeoutError."""
        if self._transport is None:
            raise ConnectionError("not connected")
        self._clear()
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        async with asyncio.timeout(timeout):
            await self._done

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # -- asyncio's side ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.open = transport, True  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(ConnectionError(f"not HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        self._end(ConnectionError("the server closed the connection"))

    def _end(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)

    # -- httptools' side -----------------------------------------------------------------------

    def on_body(self, data: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self.problem += data[:2000]
            return
        *events, self._tail = (self._tail + data).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: [DONE]"):
                self.finished = True
            elif b'"choices":[]' in event or b'"choices": []' in event:
                self._last(event)
            elif event.startswith(b"data: {"):
                if b'"error"' in event[:40]:
                    self.problem = event[6:]
                else:
                    self.times.append(self._now)
                    if b'"usage":{' in event or b'"usage": {' in event:
                        self._last(event)

    def _last(self, event: bytes) -> None:
        with contextlib.suppress(ValueError):
            self.usage = json.loads(event[6:]).get("usage") or self.usage

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self.problem = f"{status}: ".encode() + self.problem
        elif not self.finished and not self.problem:
            self.problem = b"the stream ended early"
        keep = self._parser.should_keep_alive()
        self._end(None)
        if not keep:
            self.open = False


class LoadClient:
    def __init__(self, job: ClientLoad) -> None:
        self._job = job
        parts = urlsplit(job.url)
        self._host = parts.hostname or "localhost"
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        head = [f"POST {parts.path} HTTP/1.1", f"Host: {parts.netloc}"]
        head += ["Content-Type: application/json"]
        head += [f"{name}: {value}" for name, value in job.headers.items()]
        self._head = "\r\n".join(head).encode()
        self._idle: list[HttpConnection] = []

    async def run(self) -> Answers:
        job = self._job
        await asyncio.sleep(max(0.0, job.begin - time.perf_counter()))
        cpu, start = time.process_time(), time.perf_counter()
        if job.send_at is not None:
            answers = await asyncio.gather(
                *(self._later(i, at) for i, at in enumerate(job.send_at))
            )
        else:
            answers = await self._all()
        cpu = (time.process_time() - cpu) / max(1e-9, time.perf_counter() - start)
        for connection in self._idle:
            connection.close()
        return Answers(list(answers), cpu)

    async def _all(self) -> list[Answer]:
        """Sends requests, as many at once as allowed."""
        waiting = iter(range(len(self._job.bodies)))
        answers: list[Answer] = []

        async def work() -> None:
            for index in waiting:
                answers.append(await self._one(index))

        workers = self._job.concurrency or len(self._job.bodies)
        await asyncio.gather(*(work() for _ in range(workers)))
        return answers

    async def _later(self, index: int, at: float) -> Answer:
        await asyncio.sleep(max(0.0, self._job.begin + at - time.perf_counter()))
        return await self._one(index)

    async def _one(self, index: int) -> Answer:
        body = self._job.bodies[index]
        length = f"\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        answer = Answer(index, time.perf_counter())
        connection = None
        try:
            connection = await self._connection()
            await connection.ask(self._head + length + body, self._job.timeout)
            answer.error = connection.problem[:500].decode(errors="replace")
        except TimeoutError:
            answer.error = f"no end after {self._job.timeout:g} s"
        except OSError as error:
            answer.error = str(error) or type(error).__name__
        answer.ended = time.perf_counter()
        if connection is not None:
            self._note(answer, connection)
        return answer

    def _note(self, answer: Answer, connection: HttpConnection) -> None:
        answer.events = np.asarray(connection.times).tobytes()
        usage = connection.usage
        answer.prompt_tokens = usage.get("prompt_tokens", 0)
        answer.output_tokens = usage.get("completion_tokens", len(connection.times))
        details = usage.get("prompt_tokens_details") or {}
        answer.cached_tokens = details.get("cached_tokens") or 0
        if connection.open and not answer.error.startswith("no end"):
            self._idle.append(connection)
        else:
            connection.close()

    async def _connection(self) -> HttpConnection:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, made = await loop.create_connection(
                HttpConnection, self._host, self._port, ssl=self._tls
            )
        return made


def main() -> None:
    import uvloop

    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ClientLoad)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answers = runner.run(LoadClient(job).run())
    data = memoryview(msgspec.msgpack.encode(answers))
    while data:  # A write to a pipe may write only a part.
        data = data[os.write(sys.stdout.fileno(), data) :]


if __name__ == "__main__":
    main()
