"""One server for all tests that leave it running, and a new one for each test that stops it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import openai
import pytest

from tests.server.server_process import Server, start_server
from tests.server.shared_routes import share

share()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    running = start_server()
    yield running
    running.stop()


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.client()


@pytest.fixture
def launch() -> Iterator[Callable[..., Server]]:
    """Starts servers for one test, and cleans them up."""
    started: list[Server] = []

    def start(*flags: str) -> Server:
        started.append(start_server(*flags))
        return started[-1]

    yield start
    for running in started:
        running.stop(signal.SIGKILL)
