"""A replica with valid answers to the router's questions, and with any bytes for requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from quire.server.http.replica_proofs import TAG_HEADER

READY = (b"/ready", b"/load", b"/v1/models", b"/kv/events")


class HostileReplica:
    """Answers each request with the bytes that `answer` returns.

    Attributes:
        answer: maps a request's target, tag and body to the bytes to send.
        questions: targets of the router's questions that also get these bytes.
        late: maps as `answer`; its bytes go before the next answer on the same connection.
        more: runs after each answer.
        sent: number of bytes of all answers.
    """

    def __init__(self, answer: Callable[[bytes, bytes, bytes], bytes]) -> None:
        self.answer = answer
        self.questions: tuple[bytes, ...] = ()
        self.more: Callable[[asyncio.StreamWriter], Awaitable[None]] | None = None
        self.late: Callable[[bytes, bytes, bytes], bytes] = lambda *_: b""
        self.sent = 0
        self.requests = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        late = b""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                fields = dict(line.partition(b": ")[::2] for line in head.split(b"\r\n")[1:])
                body = await reader.readexactly(int(fields[b"content-length"]))
                target, tag = head.split(b" ")[1], fields[TAG_HEADER]
                if target in READY and target not in self.questions:
                    writer.write(valid_answer(target, tag))
                    continue
                self.requests += 1
                data = late + self.answer(target, tag, body)
                late = self.late(target, tag, body)
                self.sent += len(data)
                writer.write(data)
                await writer.drain()
                if self.more is not None:
                    await self.more(writer)
        writer.close()


def valid_answer(target: bytes, tag: bytes) -> bytes:
    """Returns a server's answer to a router's question."""
    bodies = {
        b"/load": b'{"running": 0, "waiting": 0, "checkpoint": "a"}',
        b"/v1/models": b'{"data": [{"id": "fake"}]}',
    }
    return answer(bodies.get(target, b""), tag, b"404 No" if target == b"/kv/events" else b"200 OK")


def answer(body: bytes, tag: bytes | None = None, status: bytes = b"200 OK") -> bytes:
    tagged = b"" if tag is None else b"%s: %s\r\n" % (TAG_HEADER, tag)
    return b"HTTP/1.1 %s\r\n%scontent-length: %d\r\n\r\n%s" % (status, tagged, len(body), body)


@contextlib.asynccontextmanager
async def hostile(replica: HostileReplica) -> AsyncIterator[str]:
    """Serves the replica; yields its address."""
    server = await asyncio.start_server(replica.serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
