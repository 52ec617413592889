"""The listener's connections: new ones, silent ones, and errors when accepting them."""

from __future__ import annotations

import errno
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from quire.features.disaggregation import listener as listener_module
from quire.features.disaggregation.listener import Listener
from quire.features.disaggregation.messages import End, Grant, OpenGrant, PeerChannel
from quire.features.disaggregation.reader_link import LinkClosed, ReaderMessage

GRANT = Grant("name", "epoch", 1, "reader", 1.0, 0)
News = queue.SimpleQueue[ReaderMessage | LinkClosed]


@contextmanager
def listening(lease: float = 30.0) -> Iterator[tuple[Listener, News]]:
    news: News = queue.SimpleQueue()
    made = Listener("127.0.0.1", 0, None, news.put, lambda: None, lambda *_: None, lease, lambda: 0)
    try:
        yield made, news
    finally:
        made.close()


def connect(to: Listener) -> socket.socket:
    return socket.create_connection(("127.0.0.1", to.port), 5)


def assert_answered(to: Listener, news: News) -> None:
    """A reader connects, shows its grant and receives the end of the transfer."""
    with connect(to) as connected:
        channel = PeerChannel(connected)
        channel.send(OpenGrant(GRANT))
        while not isinstance(heard := news.get(timeout=5), ReaderMessage):
            pass  # the end of another
        assert heard.message == OpenGrant(GRANT)
        heard.link.send(End(1.0))
        heard.link.close()
        assert channel.receive() == End(1.0)
        while news.get(timeout=5) != LinkClosed(heard.link):
            pass


def test_readers_are_accepted_again_once_files_can_be_opened(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener_module, "_TICK", 0.01)
    failures = [errno.EMFILE] * 3 + [errno.ENFILE, errno.ECONNABORTED]
    accept = socket.socket.accept

    def failing(self: socket.socket) -> Any:
        if failures:
            number = failures.pop()
            raise OSError(number, os.strerror(number))
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", failing)
    with listening() as (listener, news):
        assert_answered(listener, news)
    assert not failures
    assert len([r for r in caplog.records if "readers cannot connect for now" in r.message]) == 1


@pytest.mark.parametrize("name", ["kv-reader", "kv-writer"])
def test_readers_are_accepted_again_once_threads_can_start(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, failed = threading.Thread.start, []

    def failing(self: threading.Thread) -> None:
        if self.name == name and not failed:
            failed.append(self)
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", failing)
    with listening() as (listener, news):
        with connect(listener) as refused:
            assert refused.recv(1) == b""
        assert_answered(listener, news)
    assert "connection failed: can't start new thread" in caplog.text


def test_a_connection_without_a_grant_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that sends a byte now and then is closed, too; one with a grant stays."""
    monkeypatch.setattr(listener_module, "_TICK", 0.01)
    with (
        listening(lease=0.3) as (listener, news),
        connect(listener) as reader,
        connect(listener) as silent,
        connect(listener) as slow,
    ):
        PeerChannel(reader).send(OpenGrant(GRANT))
        slow.setblocking(False)
        for _ in range(100):
            try:
                slow.send(b"\0")
                ended = slow.recv(1) == b""
            except BlockingIOError:
                ended = False
            except OSError:
                ended = True
            if ended:
                break
            time.sleep(0.02)
        assert ended
        assert silent.recv(1) == b""
        heard = news.get(timeout=5)
        assert isinstance(heard, ReaderMessage)
        heard.link.send(End(1.0))
        assert PeerChannel(reader).receive() == End(1.0)


def test_silent_connections_leave_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "_MOST_LINKS", 3)
    with listening() as (listener, news):
        silent = [connect(listener) for _ in range(5)]
        assert silent[0].recv(1) == silent[1].recv(1) == b""
        assert_answered(listener, news)
        readers = [connect(listener) for _ in range(3)]
        for reader in readers:
            PeerChannel(reader).send(OpenGrant(GRANT))
            while not isinstance(news.get(timeout=5), ReaderMessage):
                pass
        with connect(listener) as late:
            assert late.recv(1) == b""  # all have shown grants
        for connected in (*silent, *readers):
            connected.close()
