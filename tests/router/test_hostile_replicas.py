"""The router with replicas that break HTTP, fall silent, or never stop sending."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from quire.errors import ConfigError
from quire.http_client import HttpClient
from quire.server.http.replica_proofs import TAG_HEADER
from tests.router.fake_replica import FakeReplica, serving
from tests.router.hostile_replica import HostileReplica, answer, hostile
from tests.router.test_routing import ADMIN, Setup, routed, run

HEAD_BOUND = 1 << 20
"""Bytes that a router may read of a head without an end, with all buffers on the way."""


@contextlib.asynccontextmanager
async def before(replica: HostileReplica, **settings: Any) -> AsyncIterator[Setup]:
    async with hostile(replica) as url, routed(**settings) as setup:
        setup.fleet.join(url)
        await setup.until(lambda: all(each.healthy for each in setup.fleet))
        yield setup


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"HTTP/1.1 099 No\r\ncontent-length: 0\r\n\r\n", "its status is 099"),
        (b"HTTP/1.1 000 No\r\ncontent-length: 0\r\n\r\n", "its status is 000"),
        (b"HTTP/1.1 999 No\r\ncontent-length: 0\r\n\r\n", "its status is 999"),
        (b"HTTP/1.1 600 No\r\ncontent-length: 0\r\n\r\n", "its status is 600"),
        (b"HTTP/1.1 101 No\r\n\r\n", "its status is 101"),
        (
            b"HTTP/1.1 101 No\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
            "its status is 101",
        ),
        (b"SSH-2.0-OpenSSH\r\n", "not valid HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nx", "not valid HTTP"),
        (
            b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\nx",
            "not valid HTTP",
        ),
        (b"HTTP/1.1 200 OK\r\nbad name: 1\r\ncontent-length: 0\r\n\r\n", "not valid HTTP"),
        (b"HTTP/1.1 200 OK\r\nx: a\x00b\r\ncontent-length: 0\r\n\r\n", "not valid HTTP"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"x" * 600_000 + b"\r\n\r\n", "the head of its answer has"),
        (b"HTTP/1.1 100 Go on\r\n\r\n" * 30_000, "the head of its answer has"),
        (b"HTTP/1.1 200 " + b"x" * 600_000 + b"\r\n\r\n", "the head of its answer has"),
        (answer(b"x", b"9999"), "to another request"),
    ],
)
def test_malformed_answers_are_not_forwarded(data: bytes, reason: str) -> None:
    async def main() -> None:
        replica = HostileReplica(lambda *_: data)
        async with before(replica) as setup:
            (known,) = setup.fleet
            known.upstream.close()  # on a kept connection it would be asked again
            refused = await setup.ask()
            assert refused.status_code == 502, refused.text
            assert refused.json()["error"]["code"] == "bad_answer"
            assert reason in refused.json()["error"]["message"]
            # Another replica's answer is acceptable, too.
            async with contextlib.AsyncExitStack() as stack:
                good = FakeReplica()
                good.gate.set()
                setup.fleet.join(await stack.enter_async_context(serving(good)))
                await setup.until(lambda: all(each.healthy for each in setup.fleet))
                assert {(await setup.ask()).status_code for _ in range(3)} == {200}

    run(main)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("tagged", [False, True])
def test_clients_get_no_answer_of_another(apart: bool, tagged: bool) -> None:
    """Each request gets two answers: the second one at once, or after the next request."""

    async def main() -> None:
        def second(target: bytes, tag: bytes, body: bytes) -> bytes:
            return answer(body + b" again", tag if tagged else None)

        def first(target: bytes, tag: bytes, body: bytes) -> bytes:
            return answer(body, tag) + (b"" if apart else second(target, tag, body))

        replica = HostileReplica(first)
        if apart:
            replica.late = second
        async with before(replica) as setup:

            async def ask(number: int) -> None:
                for turn in range(10):
                    body = b"%d %d" % (number, turn)
                    found = await setup.http.post("/v1/completions", content=body)
                    assert (found.status_code, found.content) == (200, body)
                    assert TAG_HEADER.decode() not in found.headers

            await asyncio.gather(*(ask(number) for number in range(8)))

    run(main)


def test_connections_are_kept_only_after_identifiable_answers() -> None:
    async def main() -> None:
        replica = HostileReplica(lambda target, tag, body: answer(body))
        async with before(replica) as setup:
            (known,) = setup.fleet
            for _ in range(3):
                known.upstream.close()
                assert (await setup.ask()).status_code == 200
            # An answer on a kept connection is not trusted: the request is sent again on a new one.
            await setup.until(lambda: bool(known.upstream._idle))
            asked = replica.requests
            assert (await setup.ask()).status_code == 200
            assert replica.requests == asked + 2

    run(main)


def test_trailers_are_dropped_and_framing_is_bounded() -> None:
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"

    async def main() -> None:
        replica = HostileReplica(lambda *_: chunked + b"1\r\nx\r\n0\r\nx-late: 1\r\n\r\n")
        async with before(replica) as setup:
            found = await setup.ask()
            assert (found.status_code, found.content) == (200, b"x")
            assert "x-late" not in found.headers
            for tail in (
                b"1\r\nx\r\n0\r\n" + b"x-late: 1\r\n" * 60_000,
                b"1;" + b"x" * 600_000 + b"\r\nx\r\n0\r\n\r\n",
            ):
                replica.answer = lambda *_, tail=tail: chunked + tail  # type: ignore[misc]
                with contextlib.suppress(httpx.RemoteProtocolError):
                    assert (await setup.ask()).status_code == 502
                await setup.until(lambda: all(each.healthy for each in setup.fleet))

    run(main)


@pytest.mark.parametrize("where", ["head", "body"])
@pytest.mark.parametrize("question", [b"/ready", b"/load", b"/v1/models"])
def test_answers_without_an_end_are_not_read_to_it(where: str, question: bytes) -> None:
    begin = b"HTTP/1.1 200 OK\r\n"
    begin += b"x: " if where == "head" else b"content-length: 9999999999\r\n\r\n"

    async def main() -> None:
        replica = HostileReplica(lambda *_: begin)

        async def endless(writer: asyncio.StreamWriter) -> None:
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
                replica.sent += 65536
                assert replica.sent < 64 << 20

        replica.more = endless
        async with before(replica) as setup:
            (known,) = setup.fleet
            replica.questions = (question,)
            await setup.until(lambda: known.health == "lost")
            assert (await setup.http.get("/health")).status_code == 200
            first, failures = replica.sent, known.failures
            bound = HEAD_BOUND if where == "head" else 8 << 20
            assert first < bound * 2 + (8 << 20)
            replica.questions = ()
            await setup.until(lambda: known.healthy)
            assert failures >= 1

    run(main)


def test_a_replica_that_is_ready_but_silent() -> None:
    async def main() -> None:
        begun = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n"
        replica = HostileReplica(lambda target, *_: b"" if target == b"/v1/completions" else begun)
        async with before(replica, answer_timeout=0.1) as setup:
            (known,) = setup.fleet
            for _ in range(2):
                asked = replica.requests
                refused = await setup.ask()
                assert refused.status_code == 504
                assert refused.json()["error"]["code"] == "timeout"
                assert "--answer-timeout" in refused.json()["error"]["message"]
                assert replica.requests == asked + 1  # it may have been computed: not sent again
            with pytest.raises(httpx.RemoteProtocolError):
                await setup.http.post("/v1/chat/completions", json={})
            assert known.healthy
            assert known.state.running == 0

    run(main)


def test_a_model_that_changes_while_its_server_is_ready() -> None:
    async def main() -> None:
        first, second = FakeReplica(), FakeReplica()
        second.gate.set()
        async with routed(first, second) as setup:
            _, stays = setup.fleet
            first.checkpoint = "b"
            await setup.until(lambda: list(setup.fleet) == [stays])
            assert (await setup.ask()).status_code == 200
            second.name = "other"  # it is alone
            await setup.until(lambda: {e.id for e in stays.model or ()} == {"other"})
            assert stays.healthy

    run(main)


@pytest.mark.parametrize("host", ["a" * 300, "a." * 150 + "de", "a..de"])
def test_names_that_no_host_can_have(host: str) -> None:
    async def main() -> None:
        async with routed(FakeReplica()) as setup:
            url = f"http://{host}:8000"
            refused = await setup.http.post("/replicas", json={"url": url}, headers=ADMIN)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "url"
            assert "is not an http address" in refused.json()["error"]["message"]
            with pytest.raises(ConfigError, match="is not an http address"):
                HttpClient(url)

    run(main)
