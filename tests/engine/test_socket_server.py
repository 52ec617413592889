"""The engine's connections: whole messages, sends that never block, and disconnects."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.loop.messages import FromEngine, Ping, Pong, decode_to_engine, encode
from quire.engine.process.connection import Connection, FrameDecoder, Link, SocketServer, framed
from quire.errors import EngineDeadError


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(1, 9), min_size=1))
def test_messages_are_whole_wherever_the_stream_is_cut(
    messages: list[bytes], sizes: list[int]
) -> None:
    stream, decoder = b"".join(map(framed, messages)), FrameDecoder()
    found, at, turn = [], 0, 0
    while at < len(stream):
        size = sizes[turn % len(sizes)]
        found += decoder.feed(stream[at : at + size])
        at, turn = at + size, turn + 1
    assert found == messages


def _connected(
    path: Path, server: SocketServer | None = None
) -> tuple[SocketServer, socket.socket, Connection]:
    server = server or SocketServer(str(path))
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(path))
    client.sendall(framed(b"hello"))
    arrived = server.receive(wait=True)
    assert arrived is not None
    assert arrived[1] == b"hello"
    return server, client, arrived[0]


def test_without_anything_to_read_it_does_not_wait(tmp_path: Path) -> None:
    server, client, connection = _connected(tmp_path / "engine")
    assert server.receive(wait=False) is None
    client.sendall(framed(b"1") + framed(b"") + framed(b"3")[:2])
    assert server.receive(wait=True) == (connection, b"1")
    assert server.receive(wait=False) == (connection, b"")
    assert server.receive(wait=False) is None
    client.sendall(framed(b"3")[2:])
    assert server.receive(wait=True) == (connection, b"3")
    client.close()
    server.close(0)


def test_a_client_that_does_not_read_delays_no_other(tmp_path: Path) -> None:
    server, client, connection = _connected(tmp_path / "engine")
    messages = [bytes([i]) * 100_000 for i in range(100)]
    for message in messages:
        server.send(connection, message)
    assert len(connection.unsent) > 5_000_000
    found: list[bytes] = []

    def read() -> None:
        decoder = FrameDecoder()
        while len(found) < len(messages):
            found.extend(decoder.feed(client.recv(1 << 16)))
        client.sendall(framed(b"all"))

    reader = threading.Thread(target=read)
    reader.start()
    assert server.receive(wait=True) == (connection, b"all")
    reader.join()
    assert found == messages
    assert not connection.unsent
    client.close()
    server.close(0)


def test_a_disconnect_is_reported_once_and_nothing_more_is_sent(tmp_path: Path) -> None:
    server, client, connection = _connected(tmp_path / "engine")
    client.sendall(framed(b"last"))
    client.close()
    assert server.receive(wait=True) == (connection, b"last")
    assert server.receive(wait=True) == (connection, None)
    server.send(connection, b"nobody hears this")
    assert server.receive(wait=False) is None
    server.close(0)


def test_a_client_that_left_is_noticed_by_sending_too(tmp_path: Path) -> None:
    server, client, connection = _connected(tmp_path / "engine")
    server.send(connection, b"x" * 10_000_000)
    client.close()
    server.send(connection, b"y")
    assert server.receive(wait=True) == (connection, None)
    server.close(0)


def test_last_messages_reach_connected_clients(tmp_path: Path) -> None:
    server, client, connection = _connected(tmp_path / "engine")
    deaf = [_connected(tmp_path / "engine", server)[1:] for _ in range(5)]
    for each in (connection, *(other for _, other in deaf)):
        server.send(each, b"z" * 3_000_000)
    found: list[bytes] = []

    def read() -> None:
        decoder = FrameDecoder()
        while data := client.recv(1 << 16):
            found.extend(decoder.feed(data))

    reader = threading.Thread(target=read)
    reader.start()
    begun = time.monotonic()
    server.close(0.5)
    assert time.monotonic() - begun < 5
    reader.join()
    assert [len(message) for message in found] == [3_000_000]
    assert not (tmp_path / "engine").exists()
    for other, _ in deaf:
        other.close()


def test_a_link_comes_and_goes_with_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "engine"
    path.touch()  # left by one that was killed

    async def go() -> list[object]:
        seen: list[object] = []
        news = asyncio.Event()

        def note(what: object) -> None:
            seen.append(what)
            news.set()

        def heard(message: FromEngine) -> None:
            note(type(message))

        link = Link(
            str(path), on_up=lambda: note("up"), on_down=lambda: note("down"), on_message=heard
        )
        await asyncio.sleep(0.1)
        with pytest.raises(EngineDeadError):
            link.send(Ping())
        for _ in range(2):
            server = SocketServer(str(path))
            await _until(news, seen, "up")
            link.send(Ping())
            arrived = await asyncio.to_thread(server.receive, wait=True)
            assert arrived is not None
            assert arrived[1] is not None
            assert isinstance(decode_to_engine(arrived[1]), Ping)
            server.send(arrived[0], encode(Pong()))
            await _until(news, seen, Pong)
            server.close(0)
            await _until(news, seen, "down")
        link.close()
        link.close()
        return seen

    assert asyncio.run(asyncio.wait_for(go(), 20)) == ["up", Pong, "down"] * 2


async def _until(news: asyncio.Event, seen: list[object], what: object) -> None:
    while not seen or seen[-1] != what:
        news.clear()
        await news.wait()
