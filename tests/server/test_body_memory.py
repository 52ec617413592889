"""The shared memory of request bodies: bodies beyond the limit are refused, and stalled ones are
dropped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from quire.errors import ConfigError
from quire.server.args import ServerArgs
from quire.server.context import body_budget
from quire.server.context.body_budget import FREE_BYTES, BodyBudget
from quire.server.errors import ApiError
from tests.server.fakes import FakeClient
from tests.server.inprocess import connect, run

JSON = {"content-type": "application/json"}
ARGS = ServerArgs(max_body_mb=0.5, max_body_memory_mb=1.0)
LARGE = 400_000


async def body(end: asyncio.Event) -> AsyncIterator[bytes]:
    """Yields a valid body of `LARGE` bytes; the last byte waits for `end`."""
    start = b'{"prompt": [1, 2, 3]'
    yield start + b" " * (LARGE - len(start) - 1)
    await end.wait()
    yield b"}"


def test_bodies_beyond_the_memory_are_refused_and_small_ones_pass() -> None:
    async def go() -> None:
        end = asyncio.Event()
        async with connect(FakeClient(), ARGS) as http:

            async def ask() -> httpx.Response:
                return await http.post("/v1/completions", content=body(end), headers=JSON)

            bodies = http._transport.app.state.server.bodies  # type: ignore[attr-defined]
            asked = [asyncio.create_task(ask()) for _ in range(6)]
            done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            while len(done) < 4:
                done = {each for each in asked if each.done()}
                await asyncio.sleep(0.01)
            for each in done:
                assert each.result().status_code == 503
                assert each.result().headers["retry-after"] == "1"
                error = each.result().json()["error"]
                assert error["code"] == "body_memory_full"
                assert "--max-body-memory-mb" in error["message"]
            assert bodies.used == 2 * (LARGE - 1 - FREE_BYTES)
            small = await http.post("/v1/completions", json={"prompt": [1, 2, 3]})
            assert small.status_code == 200
            refused = await http.post("/v1/messages", content=body(end), headers=JSON)
            assert refused.status_code == 503
            assert refused.json()["type"] == "error"
            end.set()
            assert {(await each).status_code for each in set(asked) - done} == {200}
            assert bodies.used == 0
            assert not bodies._incoming

    run(go())


def test_a_body_that_stands_still_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "STALLED_SECONDS", 0.0)

    async def go() -> None:
        end = asyncio.Event()
        async with connect(FakeClient(), ARGS) as http:

            async def ask(end: asyncio.Event) -> httpx.Response:
                return await http.post("/v1/completions", content=body(end), headers=JSON)

            asked = [asyncio.create_task(ask(end)) for _ in range(2)]
            bodies = http._transport.app.state.server.bodies  # type: ignore[attr-defined]
            while bodies.used < 2 * (LARGE - 1 - FREE_BYTES):
                await asyncio.sleep(0.01)
            ended = asyncio.Event()
            ended.set()
            assert (await ask(ended)).status_code == 200
            first = await asked[0]
            assert (first.status_code, first.json()["error"]["code"]) == (503, "body_memory_full")
            end.set()
            assert (await asked[1]).status_code == 200
            assert bodies.used == 0

    run(go())


def test_a_body_that_was_dropped_reserves_no_more_memory() -> None:
    async def go() -> None:
        budget = BodyBudget(100)
        with budget.hold() as held:
            held.take(b"x" * (FREE_BYTES + 100))
            held.give_way()
            assert budget.used == 0
            with pytest.raises(ApiError, match="hold all"):
                held.take(b"x")
            with pytest.raises(ApiError, match="hold all"):
                held.finish()
        assert budget.used == 0

    run(go())


def test_the_memory_holds_the_largest_body() -> None:
    with pytest.raises(ConfigError, match="max_body_memory_mb=256 must be at least max_body_mb=30"):
        ServerArgs(max_body_mb=300.0)
    for wrong in (float("nan"), float("inf"), 1.0):
        with pytest.raises(ConfigError, match="max_body_memory_mb"):
            ServerArgs(max_body_memory_mb=wrong)
