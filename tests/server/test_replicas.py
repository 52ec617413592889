"""A server with several engines: if one dies, only its requests fail."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import openai
import pytest

from tests.server.server_process import MODEL, Server
from tests.server.test_faults import LONG, answers, status
from tests.server.test_lost_ranks import children


def test_a_dead_replica(launch: Callable[..., Server]) -> None:
    server = launch("--engine-restarts", "1", "--data-parallel-size", "2")
    engines = children(server.process.pid, "quire.engine.process.process")
    assert len(engines) == 2
    streams = [
        iter(
            server.client().completions.create(
                **{**LONG, "max_tokens": 120, "prompt": prompt}, stream=True
            )
        )
        for prompt in ("Once", "Twice")
    ]
    for stream in streams:
        next(stream)
    assert server.metric("quire_requests_running") == 2
    os.kill(engines[0], signal.SIGKILL)
    ends = []
    for stream in streams:
        try:
            ends.append([chunk.choices for chunk in stream][-1][0].finish_reason)
        except openai.APIError as error:
            ends.append(error.code)
    assert sorted(ends) == ["engine_dead", "length"]
    assert status(server, "/health") == 200
    assert answers(server)
    server.wait_for(
        lambda: server.metric('quire_replica_up{replica="0"}') == 1, "the replica to be back"
    )
    assert all(answers(server) for _ in range(4))
    assert server.stop() == 0


def test_equal_prompts_go_to_the_same_replica(launch: Callable[..., Server]) -> None:
    """Independent API processes do so, too."""
    server = launch("--data-parallel-size", "2", "--api-workers", "2")
    prompt = "The gatherings of a book are sewn one to another, and so are its pages. " * 4
    for _ in range(6):
        with server.client() as fresh:
            fresh.completions.create(model=MODEL, prompt=prompt, max_tokens=2)
    queried = server.metric("quire_prefix_query_tokens_total")
    assert server.metric("quire_prefix_hit_tokens_total") >= 0.75 * queried
    assert server.stop() == 0


def test_too_many_replicas(launch: Callable[..., Server]) -> None:
    with pytest.raises(BaseException, match="data_parallel_size must be in"):
        launch("--data-parallel-size", "0")
