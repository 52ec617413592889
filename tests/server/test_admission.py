"""A real server under overload: refused and aborted requests, and no resources in use
afterwards."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import uvicorn

from quire.server.process import uvicorn_server
from tests.server.server_process import MODEL, Server

LONG: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 1500, "ignore_eos": True}
SHORT = {"model": MODEL, "prompt": "Once", "max_tokens": 2}


def test_overload_timeouts_and_leavers(launch: Callable[..., Server]) -> None:
    server = launch("--max-num-seqs", "1", "--max-queue", "2", "--request-timeout", "1.5")
    url = f"{server.url}/v1/completions"

    def ask(body: dict[str, Any]) -> httpx.Response:
        return httpx.post(url, json=body, timeout=60)

    def idle() -> bool:
        gauges = ("quire_requests_running", "quire_requests_waiting", "quire_open_requests")
        return not any(map(server.metric, gauges))

    assert ask(SHORT).status_code == 200
    huge = ask({**SHORT, "prompt": "x" * 8_000_000})
    assert huge.status_code == 400
    assert huge.json()["error"]["code"] == "context_length_exceeded"
    assert "8000000 characters" in huge.json()["error"]["message"]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, [LONG] * 12))
    codes = [answer.status_code for answer in answers]
    refused = [answer for answer in answers if answer.status_code == 503]
    assert set(codes) <= {503, 504}
    assert 1 <= codes.count(504) <= 4
    assert len(refused) >= 8
    for answer in refused:
        assert answer.json()["error"]["code"] == "overloaded"
        assert answer.headers["retry-after"] == "1"
    server.wait_for(idle, "the engine to be free")

    stream = ask({**LONG, "stream": True})
    last = [line for line in stream.text.splitlines() if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
    server.wait_for(idle, "the timed-out stream to end")

    with httpx.stream("POST", url, json={**LONG, "stream": True}) as response:
        next(response.iter_lines())
    server.wait_for(idle, "the leaver's request to end")
    assert ask(SHORT).status_code == 200


@contextlib.contextmanager
def bounded(
    monkeypatch: pytest.MonkeyPatch, seen: list[dict[str, Any]] | None = None
) -> Iterator[int]:
    """The port of a server that waits half a second for a head, or the rest of a refused body.

    Bodies sent to `/read` are read, others are not. Requests to `/hold` are not answered. `seen`:
    gets the scope of each request, in it its "body", and as "left" what tells that its client is
    gone.
    """
    monkeypatch.setattr(uvicorn_server, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(uvicorn_server, "LINGER_SECONDS", 0.5)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message, body = {"more_body": scope["path"] == "/read"}, b""
        while message.get("more_body"):
            message = await receive()
            body += message.get("body", b"")
        scope = {**scope, "body": body}
        if scope["path"] == "/hold":
            await receive()  # the empty body
            scope = {**scope, "left": await receive()}
        if seen is not None:
            seen.append(scope)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(
        app, http=uvicorn_server.BoundedHttpProtocol, lifespan="off", log_config=None, port=0
    )
    server = uvicorn.Server(config)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        serving = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        serving.start()
        yield sock.getsockname()[1]
        server.should_exit = True
        serving.join(30)


def ended(sock: socket.socket) -> bytes:
    """Returns the bytes received until the server closed."""
    sock.settimeout(20)
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(65536):
            parts.append(part)
    return b"".join(parts)


def test_heads_are_bounded_in_size_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with bounded(monkeypatch) as port:
        with socket.create_connection(("127.0.0.1", port)) as large:
            large.sendall(b"GET / HTTP/1.1\r\nX-Long: ")
            with contextlib.suppress(ConnectionError):
                for _ in range(40):
                    large.sendall(b"x" * 8192)
                    time.sleep(0.002)
            assert b"400" in ended(large)[:20]
        for begun in (b"", b"GET / HTTP/1.1\r\nHost: quire\r\n"):
            with socket.create_connection(("127.0.0.1", port)) as slow:
                slow.sendall(begun)
                assert ended(slow) == b""
        with socket.create_connection(("127.0.0.1", port)) as kept:
            for _ in range(2):
                kept.sendall(b"GET / HTTP/1.1\r\nHost: quire\r\n\r\n")
                assert kept.recv(65536).startswith(b"HTTP/1.1 204")
                time.sleep(0.7)  # idle connections between requests have another limit


def test_a_half_closed_client_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    with (
        bounded(monkeypatch, seen) as port,
        socket.create_connection(("127.0.0.1", port)) as half,
    ):
        half.sendall(b"GET /hold HTTP/1.1\r\nHost: quire\r\n\r\n")
        half.shutdown(socket.SHUT_WR)
        assert ended(half) == b""
    assert [scope["left"]["type"] for scope in seen] == ["http.disconnect"]


CHUNKED = b"POST /%s HTTP/1.1\r\nHost: quire\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("path", [b"read", b"refused"])
@pytest.mark.parametrize(
    ("begin", "part"),
    [
        (b"1\r\nx\r\n0\r\n", b"X-Some: trailer\r\n" * 500),
        (b"1\r\nx\r\n0\r\nX-Endless: ", b"x" * 8192),
        (b"1;", b"x" * 8192),
        (b"", b"1;" + b"x" * 8192 + b"\r\nx\r\n"),
    ],
    ids=["trailers", "trailer", "extension", "extensions"],
)
def test_trailers_and_extensions_are_bounded(
    monkeypatch: pytest.MonkeyPatch, path: bytes, begin: bytes, part: bytes
) -> None:
    sent = 0
    with (
        bounded(monkeypatch) as port,
        socket.create_connection(("127.0.0.1", port)) as client,
        contextlib.suppress(ConnectionError),
    ):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        client.sendall(CHUNKED % path + begin)
        while sent < 64_000_000:
            client.sendall(part)
            sent += len(part)
    assert sent < 16_000_000  # what buffers on the way hold, and no more


UPGRADE = (
    b"POST /read HTTP/1.1\r\nHost: quire\r\ncOnNeCtIoN: Keep-Alive, uPgRaDe, HTTP2-Settings\r\n"
    b"%s: %s\r\nHTTP2-Settings: AAEAAEAA\r\nX-Empty:\r\n"
)
INNER = b"GET /inner HTTP/1.1\r\nHost: quire\r\n\r\n"


@pytest.mark.parametrize("step", [1, 7, 100_000])
@pytest.mark.parametrize("chunked", [False, True])
def test_upgrades_are_ignored(monkeypatch: pytest.MonkeyPatch, chunked: bool, step: int) -> None:
    seen: list[dict[str, Any]] = []
    if chunked:
        framed = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(INNER), INNER)
    else:
        framed = b"Content-Length: %d\r\n\r\n%s" % (len(INNER), INNER)
    first = UPGRADE % (b"uPGRADE", b"h2c") + framed
    second = UPGRADE % (b"Upgrade", b"websocket") + b"\r\n"
    last = b"GET /last HTTP/1.1\r\nHost: quire\r\nConnection: close\r\n\r\n"
    data = first + second + last
    with (
        bounded(monkeypatch, seen) as port,
        socket.create_connection(("127.0.0.1", port)) as client,
    ):
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(data), step):
            client.sendall(data[start : start + step])
            time.sleep(0.0002)
        assert ended(client).count(b"HTTP/1.1 204") == 3
    assert [scope["path"] for scope in seen] == ["/read", "/read", "/last"]
    assert [scope["body"] for scope in seen] == [INNER, b"", b""]
    names = [name for name, _ in seen[0]["headers"]]
    assert names[:4] == [b"host", b"connection", b"http2-settings", b"x-empty"]


def test_a_refused_upgrade_has_no_second_request(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    with (
        bounded(monkeypatch, seen) as port,
        socket.create_connection(("127.0.0.1", port)) as client,
    ):
        head = UPGRADE.replace(b"/read", b"/refused") % (b"Upgrade", b"h2c")
        client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(INNER))
        assert client.recv(65536).startswith(b"HTTP/1.1 204")
        client.sendall(INNER)
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(65536)
    assert [scope["path"] for scope in seen] == ["/refused"]


def test_connect_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    for target in (b"quire:443", b"/read"):
        with (
            bounded(monkeypatch, seen) as port,
            socket.create_connection(("127.0.0.1", port)) as client,
        ):
            client.sendall(b"CONNECT %s HTTP/1.1\r\nHost: quire\r\n\r\n" % target + INNER)
            assert ended(client).startswith(b"HTTP/1.1 400")
    assert seen == []


def test_small_chunks_are_within_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        bounded(monkeypatch) as port,
        socket.create_connection(("127.0.0.1", port)) as client,
    ):
        client.sendall(CHUNKED % b"read" + b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 204")


def test_trailers_are_no_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    with (
        bounded(monkeypatch, seen) as port,
        socket.create_connection(("127.0.0.1", port)) as client,
    ):
        client.sendall(CHUNKED % b"read" + b"0\r\nAuthorization: Bearer late\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 204")
    assert [name for name, _ in seen[0]["headers"]] == [b"host", b"transfer-encoding"]


def test_reading_the_rest_of_a_refused_body_is_bounded_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        bounded(monkeypatch) as port,
        socket.create_connection(("127.0.0.1", port)) as client,
    ):
        client.sendall(CHUNKED % b"refused" + b"1\r\nx\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 204")
        client.settimeout(20)
        with contextlib.suppress(ConnectionError):
            for _ in range(2000):  # bytes that drip in keep nothing open
                client.sendall(b"1\r\nx\r\n")
                time.sleep(0.01)
            pytest.fail("the connection stayed open")
