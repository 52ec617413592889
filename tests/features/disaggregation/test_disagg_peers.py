"""Peers that do not answer requests for prompts, or answer nonsense."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from typing import Any

import pytest

from quire.arrays import int32
from quire.features.disaggregation import peer_list, pulls
from quire.features.disaggregation.facts import KVFacts
from quire.features.disaggregation.free_slots import FreeSlots
from quire.features.disaggregation.messages import (
    BatchAck,
    BlockBatch,
    End,
    Grant,
    GrantAccepted,
    Message,
    OpenGrant,
    PeerChannel,
)
from quire.features.disaggregation.peer_list import Peer, PeerError, PeerList
from quire.features.disaggregation.prompt_fetches import BlocksArrived, PullEnded, PullOrder
from quire.features.disaggregation.pulls import PullThreads

FACTS = KVFacts(1, "1", "tcp", "model", "float32", "auto", 16, ())
ORDER = PullOrder("request", int32(range(16)), 0, "")


def test_threads_do_not_wait_for_a_silent_peer_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_list, "_ASK_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = Peer(f"http://127.0.0.1:{silent.getsockname()[1]}", None, FACTS)
        failures: list[PeerError] = []

        def ask() -> None:
            with pytest.raises(PeerError) as failed:
                peer.ask([1], 0, "")
            failures.append(failed.value)

        threads = [threading.Thread(target=ask) for _ in range(6)]
        begun = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.monotonic() - begun < 4 * 0.5
        assert [failure.outcome for failure in failures] == ["timeout"] * 6
        assert not peer.up
        peer._not_before = 0.0  # it is asked again after the pause
        begun = time.monotonic()
        ask()
        assert time.monotonic() - begun >= 0.5


def pull(
    monkeypatch: pytest.MonkeyPatch, peer: Peer, slots: FreeSlots, answer: object
) -> PullEnded:
    """Requests a prompt from a peer that answers with a grant for a port, or with an error."""

    def ask(*_: Any) -> Grant:
        if isinstance(answer, PeerError):
            raise answer
        return Grant("name", "epoch", 1, peer.reader, 1.0, answer)  # type: ignore[arg-type]

    monkeypatch.setattr(peer, "ask", ask)
    peers = PeerList([], None, FACTS)
    peers._peers = [peer]
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    block = memoryview(bytearray(4))
    threads = PullThreads(peers, slots, lambda group, slot: block, told.put, 0.2)
    threads.start(ORDER)
    while isinstance(event := told.get(timeout=10.0), BlocksArrived):
        slots.give(event.group, event.slots)
    threads.close()
    assert isinstance(event, PullEnded)
    return event


def answer_with(server: socket.socket, messages: list[Message]) -> threading.Thread:
    def run() -> None:
        connected, _ = server.accept()
        channel = PeerChannel(connected)
        assert isinstance(channel.receive(), OpenGrant)
        for message in messages:
            channel.send(message)
        with contextlib.suppress(OSError):  # until the reader is gone
            channel.receive()
        channel.close()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize(("group", "outcome"), [(0, "overloaded"), (-1, "broken"), (7, "broken")])
def test_a_peer_is_not_blamed_for_a_full_local_pool(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    group: int,
    outcome: str,
) -> None:
    peer, slots = Peer("http://127.0.0.1:1", None, FACTS), FreeSlots(1, 0, 4)
    held = slots.put(0, int32(range(4)))
    with socket.create_server(("127.0.0.1", 0)) as server:
        batch = BlockBatch(1, group, 0, 1)
        thread = answer_with(server, [GrantAccepted(None), batch])
        ended = pull(monkeypatch, peer, slots, server.getsockname()[1])
        thread.join()
    assert (ended.outcome, peer.up) == (outcome, True)
    assert "Traceback" not in caplog.text
    slots.give(0, held)
    assert slots.used == 0


def test_a_batch_of_more_blocks_than_there_are_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    peer, slots = Peer("http://127.0.0.1:1", None, FACTS), FreeSlots(1, 0, 4)

    def write(server: socket.socket) -> None:
        connected, _ = server.accept()
        channel = PeerChannel(connected)
        channel.receive()
        channel.send(GrantAccepted(None))
        channel.send(BlockBatch(1, 0, 0, 9))
        channel.send_block(memoryview(bytes(9 * 4)))
        assert isinstance(channel.receive(), BatchAck)
        channel.send(End(0.0))
        channel.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=write, args=(server,))
        thread.start()
        assert pull(monkeypatch, peer, slots, server.getsockname()[1]).outcome == "done"
        thread.join()
    assert slots.used == 0


@pytest.mark.parametrize(("status", "up"), [(400, True), (413, True), (401, False), (503, False)])
def test_a_prompt_that_one_peer_cannot_compute_leaves_it_to_others(
    monkeypatch: pytest.MonkeyPatch, status: int, up: bool
) -> None:
    peer = Peer("http://127.0.0.1:1", None, FACTS)
    refused = PeerError("refused", "too long", status)
    assert pull(monkeypatch, peer, FreeSlots(1, 0, 4), refused).outcome == "refused"
    assert peer.up == up


def test_an_aborted_prompt_does_not_wait_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    peer, go_on = Peer("http://127.0.0.1:1", None, FACTS), threading.Event()

    def ask(*_: Any) -> Grant:
        go_on.wait(10.0)
        raise PeerError("overloaded", "later")

    monkeypatch.setattr(peer, "ask", ask)
    peers = PeerList([], None, FACTS)
    peers._peers = [peer]
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threads = PullThreads(peers, None, None, told.put, 5.0)
    begun = [threads.start(ORDER) for _ in range(pulls._THREADS + 1)]
    begun[-1].cancel()
    begun[-1].cancel()
    ended = told.get(timeout=5.0)
    assert (ended.pull, ended.outcome) == (begun[-1], "aborted")
    go_on.set()
    others = {told.get(timeout=5.0).pull for _ in begun[:-1]}
    threads.close()
    assert told.empty()
    assert others == set(begun[:-1])
