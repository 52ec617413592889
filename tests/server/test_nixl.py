"""Two real servers whose engines read each other's KV cache with the real library: answers and
metrics, also when the prefill server dies."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from quire.errors import NIXL
from tests.server.server_process import Server, start_server
from tests.server.test_disagg import FACTS, KEY, LEASE, STORY, ask, fetches, metric, post
from tests.server.test_disagg import start_reader as start
from tests.server.test_faults import child

pytestmark = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in NIXL), reason="needs the extra `nixl`"
)
WAY = ("--transport", "nixl", "--kv-transfer", "async")


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    writer = start_server("--role", "prefill", "--api-key", KEY, *WAY, *LEASE)
    reader = start(writer, *WAY)
    yield writer, reader
    for server in (reader, writer):
        server.stop(signal.SIGKILL)


def test_prompts_are_read_from_the_peers_cache(servers: tuple[Server, Server]) -> None:
    writer, reader = servers
    prompts = [f"{i} {STORY}" for i in range(2)]
    for prompt in prompts:
        text = ask(reader, prompt, temperature=0.0)
        assert text == ask(writer, prompt, KEY, temperature=0.0)
    assert fetches(reader) == 2
    assert metric(reader, "quire_kv_fetches_local_total") == 0
    sent = metric(writer, "quire_kv_blocks_sent_total")
    assert sent == metric(reader, "quire_kv_blocks_received_total") > 0
    reader.wait_for(lambda: metric(writer, "quire_kv_grants_open") == 0, "the grants' end")
    assert metric(writer, 'quire_kv_blocks{group="0",state="used"}') == 0


def test_a_transport_mismatch_names_both_transports(servers: tuple[Server, Server]) -> None:
    writer, _ = servers
    status, answer = post(writer, "/kv/handshake", {**FACTS, "transport": "tcp"})
    assert (status, answer["error"]["code"]) == (409, "peer_mismatch")
    assert "transport: 'nixl' here, 'tcp' at the peer" in answer["error"]["message"]


def test_a_writer_that_dies_and_comes_back(servers: tuple[Server, Server]) -> None:
    writer, reader = servers
    answers: list[str] = []
    # So many that even a GPU has not computed them by then.
    prompts = [f"While it dies, {i}. {STORY}" for i in range(12)]
    engine = child(writer, "quire.engine.process.process")
    threads = [
        threading.Thread(target=lambda p=p: answers.append(ask(reader, p, temperature=0.0)))  # type: ignore[misc]
        for p in prompts
    ]
    for thread in threads:
        thread.start()
    reader.wait_for(lambda: metric(writer, "quire_kv_grants_open") > 0, "a grant")
    os.kill(engine, signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert len(answers) == len(prompts)
    for name in ("quire_kv_fetches_open", 'quire_kv_blocks{group="0",state="used"}'):
        reader.wait_for(lambda name=name: metric(reader, name) == 0, f"{name} to be 0")  # type: ignore[misc]
    assert metric(reader, "quire_kv_fetches_local_total") >= 1
    writer.wait_for(lambda: metric(writer, "quire_engine_up") == 1, "the engine to be back")
    reader.wait_for(lambda: metric(reader, "quire_peers_up") == 1, "the peer to be asked again")
    before, prompt = fetches(reader), "when it is back " + STORY
    assert ask(reader, prompt, temperature=0.0) == ask(writer, prompt, KEY, temperature=0.0)
    assert fetches(reader) == before + 1
