"""Peers that are asked for prompts, and do not answer."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from quire.disagg import peer_list
from quire.disagg.facts import KVFacts
from quire.disagg.peer_list import Peer, PeerError

FACTS = KVFacts(1, "1", "tcp", "model", "float32", "auto", 16, ())


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
        peer._not_before = 0.0  # it is asked anew after the pause
        begun = time.monotonic()
        ask()
        assert time.monotonic() - begun >= 0.5
