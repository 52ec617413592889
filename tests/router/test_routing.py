"""The router with servers that refuse, die, hang and come back."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import uvloop
from typer.testing import CliRunner

from quire.cli.main import app as command
from quire.errors import ConfigError
from quire.router.app import RouterApp
from quire.router.client_keys import ClientKeys
from quire.router.fleet import Fleet, FleetSettings
from quire.router.replica import Role, RoutedReplica
from quire.router.server import build_router
from quire.server.args import ServerArgs
from quire.server.http import bodies
from quire.server.http.hosts import HostCheck
from quire.server.telemetry.tracing import Exporter
from tests.router.fake_replica import FakeReplica, serving

ADMIN = {"authorization": "Bearer adm"}
ASK: dict[str, Any] = {"json": {"prompt": "hello", "max_tokens": 3}}


@dataclass
class Setup:
    http: httpx.AsyncClient
    fleet: Fleet
    app: RouterApp
    server: uvicorn.Server

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.01)

    async def ask(self, **more: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", **{**ASK, **more})


@contextlib.asynccontextmanager
async def routed(
    *replicas: FakeReplica,
    roles: Sequence[Role] = (),
    exporter: Exporter | None = None,
    keys: ClientKeys | None = None,
    hosts: HostCheck | None = None,
    body_memory: int = 100_000,
    **settings: Any,
) -> AsyncIterator[Setup]:
    """Yields a router for these replicas once all of them are ready."""
    async with contextlib.AsyncExitStack() as stack:
        for replica in replicas:
            await stack.enter_async_context(serving(replica))
        settings.setdefault("replica_hosts", ("127.0.0.1",))
        fleet = Fleet(FleetSettings(check_seconds=0.02, **settings))
        for replica, role in zip(replicas, roles or ["both"] * len(replicas), strict=True):
            fleet.join(replica.url, role)
        stack.push_async_callback(fleet.close)
        app = build_router(fleet, "adm", 100_000, body_memory, exporter, keys, hosts)
        servers: list[uvicorn.Server] = []
        url = await stack.enter_async_context(serving(app, servers))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))
        setup = Setup(http, fleet, app, servers[0])
        await setup.until(
            lambda: all(r.healthy or not f.ready for r, f in zip(fleet, replicas, strict=True))
        )
        yield setup


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_requests_and_answers_pass_unchanged() -> None:
    async def main() -> None:
        replica = FakeReplica()
        replica.gate.set()
        async with routed(replica) as setup:
            headers = {"x-request-id": "r1", "authorization": "Bearer k", "te": "trailers"}
            answer = await setup.http.post("/v1/x%2Fy?a=b", content=b'{"x": 1}', headers=headers)
            assert (answer.status_code, answer.content) == (200, b"one two")
            assert answer.headers["x-own"] == "kept"
            method, _, sent, body = replica.seen[0]
            assert (method, body) == ("POST", b'{"x": 1}')
            assert sent["x-request-id"] == "r1"
            assert sent["authorization"] == "Bearer k"
            assert sent["x-forwarded-for"] == "127.0.0.1"
            assert sent["host"] == replica.url.partition("//")[2]
            assert "te" not in sent
            assert (await setup.http.head("/v1/other")).status_code == 200
            large = await setup.http.post("/v1/x", content=b"x" * 100_001)
            assert large.status_code == 413
            # Connections are kept for the next request.
            (routed_replica,) = setup.fleet
            await setup.until(lambda: bool(routed_replica.upstream._idle))
            assert replica.server.server_state.total_requests > 5

    run(main)


def test_streams_pass_as_they_come_and_end_where_clients_leave() -> None:
    async def main() -> None:
        replica = FakeReplica()
        async with routed(replica) as setup:
            async with setup.http.stream("POST", "/v1/completions", **ASK) as stream:
                async for part in stream.aiter_raw():
                    assert part == b"one"
                    break
            await setup.until(lambda: replica.left == 1)
            await setup.until(lambda: all(not r.state.running for r in setup.fleet))

    run(main)


def test_a_lost_replica_is_passed_over_until_it_is_back() -> None:
    async def main() -> None:
        first, second = FakeReplica(), FakeReplica()
        async with routed(first, second, policy="round-robin") as setup:
            for replica in (first, second):
                replica.gate.set()
            first.die()
            for _ in range(4):
                assert (await setup.ask()).status_code == 200
            assert len(second.seen) == 4
            await setup.until(lambda: sum(r.healthy for r in setup.fleet) == 1)
            second.die()
            await setup.until(lambda: not any(r.healthy for r in setup.fleet))
            answer = await setup.ask()
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "no_replica"
            assert "retry-after" in answer.headers
            assert (await setup.http.get("/ready")).status_code == 503
            assert (await setup.http.get("/health")).status_code == 200

    run(main)


def test_an_unready_replica_is_used_when_no_other_is_left() -> None:
    async def main() -> None:
        first, second = FakeReplica(), FakeReplica()
        async with routed(first, second) as setup:
            for replica in (first, second):
                replica.gate.set()
            first.ready = False
            await setup.until(lambda: sum(r.healthy for r in setup.fleet) == 1)
            for _ in range(4):
                assert (await setup.ask()).status_code == 200
            assert not first.seen
            second.ready = False
            await setup.until(lambda: not any(r.healthy for r in setup.fleet))
            assert (await setup.http.get("/ready")).status_code == 503
            assert (await setup.ask()).status_code == 200
            first.status = second.status = (
                503  # the answer of a server that is stopping, asleep or dead
            )
            answer = await setup.ask()
            assert (answer.status_code, answer.content) == (503, b"refused")
            first.ready, first.status = True, 200
            await setup.until(lambda: any(r.healthy for r in setup.fleet))
            assert (await setup.http.get("/ready")).status_code == 200
            assert (await setup.ask()).status_code == 200

    run(main)


def test_a_busy_replica_is_not_lost_by_one_late_answer() -> None:
    async def main() -> None:
        replica = FakeReplica()
        replica.gate.set()
        async with routed(replica, check_timeout=0.1) as setup:
            (known,) = setup.fleet
            replica.answers_late = 1
            await setup.until(lambda: known.health == "slow")
            assert (await setup.http.get("/ready")).status_code == 200
            assert (await setup.ask()).status_code == 200
            await setup.until(lambda: known.healthy)
            replica.answers_late = 1000
            await setup.until(lambda: known.health == "lost")
            assert (await setup.ask()).status_code == 503

    run(main)


def test_requests_of_a_replica_that_stands_still_are_given_up() -> None:
    """A stopped process, or a host that is gone, does not close its connections."""

    async def main() -> None:
        first, second = FakeReplica(), FakeReplica()
        async with routed(first, second, policy="round-robin", check_timeout=0.05) as setup:
            standing, _ = setup.fleet
            begun = [asyncio.create_task(setup.ask()) for _ in range(2)]
            await setup.until(lambda: bool(first.seen and second.seen))
            first.frozen = True
            waiting = [asyncio.create_task(setup.ask()) for _ in range(2)]
            await setup.until(lambda: standing.state.running == 2)
            await setup.until(lambda: standing.health == "lost")
            second.gate.set()
            # A request without an answer so far gets one from the other replica.
            assert [(await each).content for each in waiting] == [b"one two"] * 2
            ends = await asyncio.gather(*begun, return_exceptions=True)
            assert sum(isinstance(end, httpx.RemoteProtocolError) for end in ends) == 1
            assert standing.state.running == 0
            first.frozen = False
            first.gate.set()
            await setup.until(lambda: standing.healthy)

    run(main)


def test_requests_of_a_slow_replica_are_not_given_up() -> None:
    """Parts of answers still arrive, although it misses its health checks."""

    async def main() -> None:
        replica = FakeReplica()
        async with routed(replica, check_timeout=0.05) as setup:
            (known,) = setup.fleet
            begun = asyncio.create_task(setup.ask())
            await setup.until(lambda: bool(replica.seen))
            replica.answers_late = 1000
            async with asyncio.timeout(30):
                while known.failures < 4:
                    (await known.upstream.send("GET", b"/load", [], b"")).close()
                    await asyncio.sleep(0.01)
            assert known.health == "lost"
            replica.gate.set()
            assert (await begun).content == b"one two"
            replica.answers_late = 0

    run(main)


def test_refusals_are_tried_elsewhere_and_the_last_one_is_passed_on() -> None:
    async def main() -> None:
        full, free = FakeReplica(status=503), FakeReplica()
        free.gate.set()
        async with routed(full, free, policy="round-robin") as setup:
            assert [(await setup.ask()).status_code for _ in range(4)] == [200] * 4
            assert full.seen
            free.status = 503
            assert (await setup.ask()).content == b"refused"
            free.status = 400  # a mistake of the client's is the same everywhere
            seen = len(full.seen)
            answers = {(await setup.ask()).status_code for _ in range(2)}
            assert answers == {400}
            assert len(full.seen) <= seen + 2

    run(main)


def test_an_answer_that_breaks_ends_the_clients_connection() -> None:
    async def main() -> None:
        dying, other = FakeReplica(), FakeReplica()
        async with routed(dying, other, policy="round-robin") as setup:
            asked = asyncio.create_task(setup.ask())
            await setup.until(lambda: bool(dying.seen or other.seen))
            (dying if dying.seen else other).die()
            with pytest.raises(httpx.RemoteProtocolError):
                await asked
            # The client has a part of the answer already, so no other replica was tried.
            assert len(dying.seen) + len(other.seen) == 1
            text = (await setup.http.get("/metrics", headers=ADMIN)).text
            assert "quire_router_broken_answers_total 1.0" in text

    run(main)


def test_prompts_go_where_their_beginning_is_and_load_outweighs_it() -> None:
    async def main() -> None:
        replicas = [FakeReplica() for _ in range(4)]
        for replica in replicas:
            replica.gate.set()
        async with routed(*replicas) as setup:
            for turn in range(8):
                for user in range(6):
                    text = f"{user} " * 2000
                    messages = [{"role": "user", "content": text}] * (turn + 1)
                    await setup.http.post("/v1/chat/completions", json={"messages": messages})
            homes: dict[str, set[int]] = {}
            for index, replica in enumerate(replicas):
                for *_, body in replica.seen:
                    homes.setdefault(json.loads(body)["messages"][0]["content"], set()).add(index)
            assert all(len(found) == 1 for found in homes.values())
            assert len(set.union(*homes.values())) > 1
            busy = next(r for r in replicas if r.seen)
            text = json.loads(busy.seen[0][3])["messages"][0]["content"]
            busy.running = 10_000
            await setup.until(lambda: any(r.state.reported == 10_000 for r in setup.fleet))
            seen = len(busy.seen)
            body = {"messages": [{"role": "user", "content": text}]}
            await setup.http.post("/v1/chat/completions", json=body)
            assert len(busy.seen) == seen

    run(main)


def test_least_loaded() -> None:
    async def main() -> None:
        busy, idle = FakeReplica(running=5), FakeReplica()
        idle.gate.set()
        async with routed(busy, idle, policy="least-loaded") as setup:
            await setup.until(lambda: any(r.state.reported == 5 for r in setup.fleet))
            for _ in range(3):
                await setup.ask()
            assert (len(busy.seen), len(idle.seen)) == (0, 3)

    run(main)


def test_stored_answers_are_looked_for_and_files_have_a_home() -> None:
    async def main() -> None:
        first, second = FakeReplica(), FakeReplica(stored=("resp_1",))
        for replica in (first, second):
            replica.gate.set()
        async with routed(first, second) as setup:
            assert (await setup.http.get("/v1/responses/resp_1")).status_code == 200
            assert (await setup.http.get("/v1/responses/resp_2")).status_code == 404
            before = len(second.seen)
            for _ in range(3):
                assert (await setup.http.get("/v1/files")).status_code == 200
            assert len(second.seen) == before
            first.die()
            await setup.until(lambda: sum(r.healthy for r in setup.fleet) == 1)
            assert (await setup.http.get("/v1/files")).status_code == 503

    run(main)


def test_replicas_join_and_leave_under_load() -> None:
    async def main() -> None:
        first, second = FakeReplica(), FakeReplica()
        other = FakeReplica(name="other")
        for replica in (first, second, other):
            replica.gate.set()
        async with routed(first, policy="round-robin") as setup, serving(second), serving(other):
            statuses: list[int] = []

            async def load() -> None:
                while True:
                    statuses.append((await setup.ask()).status_code)

            users = [asyncio.create_task(load()) for _ in range(4)]
            post, state = setup.http.post, setup.http.get
            assert (await post("/replicas", json={"url": second.url})).status_code == 401
            joined = await post("/replicas", json={"url": second.url}, headers=ADMIN)
            assert joined.json()["ready"]
            refused = await post("/replicas", json={"url": other.url}, headers=ADMIN)
            assert refused.status_code == 409
            assert "serves other (a), this router fake (a)" in refused.json()["error"]["message"]
            await setup.until(lambda: len(second.seen) > 3)
            name = first.url.partition("//")[2]
            left = await setup.http.delete(f"/replicas/{name}", headers=ADMIN)
            assert left.json()["leaving"]
            await setup.until(lambda: len(setup.fleet.replicas) == 1)
            assert (await setup.http.delete("/replicas/x", headers=ADMIN)).status_code == 404
            swapped = await post("/replicas", json={"url": other.url, "swap": True}, headers=ADMIN)
            assert swapped.status_code == 200
            await setup.until(lambda: len(setup.fleet.replicas) == 1)
            await setup.until(lambda: len(other.seen) > 3)
            (only,) = (await state("/replicas", headers=ADMIN)).json()["replicas"]
            assert only["models"] == ["other"]
            for user in users:
                user.cancel()
            await asyncio.gather(*users, return_exceptions=True)
            assert set(statuses) == {200}

    run(main)


def test_metrics_cover_the_current_replicas() -> None:
    async def main() -> None:
        first, second = FakeReplica(), FakeReplica()
        for replica in (first, second):
            replica.gate.set()
        async with routed(first, second, policy="round-robin") as setup:
            for status in (200, 200, 400, 400):
                first.status = second.status = status
                assert (await setup.ask()).status_code == status
            text = (await setup.http.get("/metrics", headers=ADMIN)).text
            gone, stays = setup.fleet
            for name in (gone.name, stays.name):
                for status in (200, 400):
                    labels = f'{{replica="{name}",status="{status}"}}'
                    assert f"quire_router_requests_total{labels} 1.0" in text
            states = (await setup.http.get("/replicas", headers=ADMIN)).json()["replicas"]
            assert [each["requests"] for each in states] == [2, 2]
            await setup.http.delete(f"/replicas/{gone.name}", headers=ADMIN)
            await setup.until(lambda: len(setup.fleet.replicas) == 1)
            text = (await setup.http.get("/metrics", headers=ADMIN)).text
            assert gone.name not in text
            assert stays.name in text

    run(main)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"url": "ftp://x"}, 400, "is not an http address"),
        ({"url": "http://127.0.0.1:1"}, 502, "http://127.0.0.1:1: "),
        ({"address": "x"}, 400, "The body does not describe a replica"),
    ],
)
def test_invalid_replicas_cannot_join(body: dict[str, str], status: int, message: str) -> None:
    async def main() -> None:
        async with routed(FakeReplica()) as setup:
            answer = await setup.http.post("/replicas", json=body, headers=ADMIN)
            assert answer.status_code == status
            assert message in answer.json()["error"]["message"]
            assert (await setup.http.put("/replicas")).status_code == 405
            assert "Replicas" in (await setup.http.get("/fleet")).text

    run(main)


def test_a_router_is_no_replica_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        replica = FakeReplica()
        replica.gate.set()
        async with routed(replica) as setup:
            own = str(setup.http.base_url).rstrip("/")
            answer = await setup.http.post("/replicas", json={"url": own}, headers=ADMIN)
            assert answer.status_code == 502
            assert "cannot join: it is this router" in caplog.text
            # This holds through another router, too.
            async with routed() as second:
                (first,) = setup.fleet
                there = str(second.http.base_url).rstrip("/")
                joined = await second.http.post("/replicas", json={"url": own}, headers=ADMIN)
                assert joined.status_code == 200
                refused = await setup.http.post("/replicas", json={"url": there}, headers=ADMIN)
                assert refused.status_code == 502
                assert "/load answered 508" in caplog.text
                assert (await second.ask()).text == "one two"
                assert list(setup.fleet) == [first]
            looped = await setup.ask(headers={"via": setup.fleet.via.decode()})
            assert looped.status_code == 508
            assert looped.json()["error"]["code"] == "loop"

    run(main)


def test_headers_that_connection_names_are_left_out() -> None:
    async def main() -> None:
        replica = FakeReplica(
            headers=((b"Connection", b"X-Hop"), (b"X-Hop", b"1"), (b"X-End", b"2"))
        )
        replica.gate.set()
        async with routed(replica) as setup:
            sent = {"connection": "X-Own, keep-alive", "x-own": "1", "x-other": "2"}
            answer = await setup.ask(headers=sent)
            assert (answer.headers.get("x-hop"), answer.headers["x-end"]) == (None, "2")
            _, _, seen, _ = next(each for each in replica.seen if each[1] == "/v1/completions")
            assert (seen.get("x-own"), seen["x-other"]) == (None, "2")
            assert seen["via"] == setup.fleet.via.decode()

    run(main)


@pytest.mark.parametrize(
    "said", [b"<html>", b"[]", b'{"data": [{"id": 3}]}', b'"\xff"', b"[" * 9999]
)
def test_a_server_of_another_kind_is_dropped_and_cannot_join(
    said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        replica, other = FakeReplica(), FakeReplica(nonsense=said)
        async with routed(replica) as setup, serving(other):
            joining = {"url": other.url}
            answer = await setup.http.post("/replicas", json=joining, headers=ADMIN)
            assert answer.status_code == 502
            assert "is invalid" in caplog.text
            (routed_replica,) = setup.fleet
            replica.nonsense = said
            await setup.until(lambda: not routed_replica.healthy)
            replica.nonsense = None
            await setup.until(lambda: routed_replica.healthy)

    run(main)


def test_keys_and_limits_of_the_fleet(tmp_path: Path) -> None:
    """Limits count over all replicas, and answers have the same limit headers as a server's."""
    file = tmp_path / "keys.toml"
    file.write_text('[a]\nkey = "aa"\nrequests_per_minute = 3\n[b]\nkey = "bb"\n')
    file.chmod(0o600)
    keys = ClientKeys(str(file))
    limits = ((b"x-ratelimit-limit-requests", b"99"), (b"x-own", b"1"))

    async def main() -> None:
        first, second = FakeReplica(headers=limits), FakeReplica(headers=limits)
        first.gate.set()
        second.gate.set()
        async with routed(first, second, policy="round-robin", keys=keys) as setup:
            for wrong in ({}, {"authorization": "Bearer no"}, {"x-api-key": "aa"}):
                refused = await setup.ask(headers=wrong)
                assert refused.status_code == 401
                assert refused.json()["error"]["code"] == "invalid_api_key"
            asks = {"authorization": "Bearer aa"}
            left = []
            for _ in range(3):
                answer = await setup.ask(headers=asks)
                assert answer.status_code == 200
                assert answer.headers.get_list("x-ratelimit-limit-requests") == ["3"]
                assert answer.headers["x-own"] == "1"
                left.append(answer.headers["x-ratelimit-remaining-requests"])
            assert left == ["2", "1", "0"]
            assert len(first.seen) + len(second.seen) == 3
            assert min(len(first.seen), len(second.seen)) == 1
            over = await setup.ask(headers=asks)
            assert over.status_code == 429
            assert over.json()["error"]["code"] == "rate_limit_exceeded"
            assert int(over.headers["retry-after"]) > 0
            over = await setup.http.post("/v1/messages", headers={"x-api-key": "aa"}, json={})
            assert over.status_code == 429
            assert over.json()["error"]["type"] == "rate_limit_error"
            assert (await setup.http.get("/v1/files", headers=asks)).status_code == 200
            assert (await setup.ask(headers={"authorization": "Bearer bb"})).status_code == 200
            assert (await setup.http.get("/ready")).status_code == 200
            text = (await setup.http.get("/metrics", headers=ADMIN)).text
            assert 'quire_router_refused_total{status="401"} 3.0' in text
            assert 'quire_router_refused_total{status="429"} 2.0' in text
            file.write_text('[c]\nkey = "cc"\n')
            keys.reload()
            assert (await setup.ask(headers=asks)).status_code == 401
            assert (await setup.ask(headers={"authorization": "Bearer cc"})).status_code == 200

    run(main)
    keys.close()


def test_tokens_of_the_fleet() -> None:
    """An estimate is taken first. Then the tokens that the server reports count."""
    keys = ClientKeys(None, tokens_per_minute=1000)

    def left(answer: httpx.Response) -> int:
        assert answer.headers["x-ratelimit-limit-tokens"] == "1000"
        return int(answer.headers["x-ratelimit-remaining-tokens"])

    async def main() -> None:
        replica = FakeReplica()
        replica.gate.set()
        async with routed(replica, keys=keys) as setup:
            tail = b": quire-usage 20\n\n"
            for cut in range(len(tail)):
                replica.parts = (b"data: 1\n\n", b"data: 2\n\n" + tail[:cut], tail[cut:])
                answer = await setup.ask(json={"prompt": "x", "max_tokens": 100, "n": 2})
                assert answer.content == b"data: 1\n\ndata: 2\n\n"
            assert replica.seen[-1][2]["x-quire-report-usage"] == "1"
            used = 20 * len(tail)
            assert 0 <= left(answer) - (1000 - (used - 20) - 201) < 100  # the bucket fills up
            # A JSON answer reports it in a header, which is not forwarded.
            replica.headers = ((b"x-quire-usage", b"300"), (b"content-type", b"application/json"))
            replica.parts = (b"{}", b": quire-usage 1")
            answer = await setup.ask()
            assert (answer.content, answer.headers.get("x-quire-usage")) == (
                b"{}: quire-usage 1",
                None,
            )
            # A request above the limit itself is not to be retried; any other may be, later.
            over = await setup.ask(json={"prompt": "x" * 4000, "max_tokens": 100})
            assert (over.status_code, over.json()["error"]["type"]) == (429, "tokens")
            assert "may need 1101 tokens" in over.json()["error"]["message"]
            assert "retry-after" not in over.headers
            beams = {"prompt": "x", "max_tokens": 100, "n": 2, "beam_width": 12}
            over = await setup.ask(json=beams)
            assert "may need 1201 tokens" in over.json()["error"]["message"]
            over = await setup.ask(json={"prompt": "x", "max_tokens": 900})
            assert (over.status_code, int(over.headers["retry-after"]) > 0) == (429, True)
            # A refused request gives all tokens back. Without a report the estimate counts.
            replica.headers, replica.status = (), 500
            await setup.ask(json={"prompt": "x", "max_tokens": 200})
            replica.status, replica.parts = 200, (b"data: 1\n\n",)
            before = left(await setup.ask(json={"prompt": "x", "max_tokens": 100}))
            after = left(await setup.ask(json={"prompt": "x", "max_tokens": 1}))
            assert before > 1000 - used - 300 - 101 - 10
            assert before - 10 < after < before + 100
            # A prompt that is only counted takes no tokens.
            answer = await setup.http.post("/tokenize", json={"prompt": "x" * 8000})
            assert answer.status_code == 200

    run(main)
    keys.close()


def test_a_request_counts_even_if_its_client_leaves_early() -> None:
    keys = ClientKeys(None, tokens_per_minute=1000)

    async def left(setup: Setup) -> int:
        answer = await setup.http.post("/tokenize", json={})
        return int(answer.headers["x-ratelimit-remaining-tokens"])

    async def main() -> None:
        replica = FakeReplica()
        replica.gate.set()
        async with routed(replica, keys=keys) as setup:
            (known,) = setup.fleet
            replica.frozen = True
            asked = asyncio.create_task(setup.ask(json={"prompt": "x", "max_tokens": 600}))
            await setup.until(lambda: known.state.running == 1)
            asked.cancel()
            await setup.until(lambda: known.state.running == 0)
            replica.frozen = False
            assert 399 <= await left(setup) < 500
            # A request that no replica answers gives all tokens back.
            replica.die()
            for _ in range(3):
                answer = await setup.ask(json={"prompt": "x", "max_tokens": 300})
                assert answer.status_code == 503

    run(main)
    keys.close()


def test_bodies_that_are_not_utf8() -> None:
    """The router forwards invalid bodies, and refuses those for its own routes."""
    keys = ClientKeys(None, tokens_per_minute=1000)

    async def main() -> None:
        replica = FakeReplica()
        replica.gate.set()
        async with routed(replica, keys=keys) as setup:
            broken = b'{"max_tokens": "\xff"}'
            assert (await setup.http.post("/v1/completions", content=broken)).status_code == 200
            assert replica.seen[-1][3] == broken
            refused = await setup.http.post("/replicas", content=b'{"url": "\xff"}', headers=ADMIN)
            assert refused.status_code == 400
            assert "The body does not describe a replica" in refused.json()["error"]["message"]

    run(main)
    keys.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/replicas"])
def test_bodies_that_do_not_come_run_out_of_time(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.1)

    async def main() -> None:
        replica = FakeReplica()
        async with routed(replica) as setup, asyncio.timeout(10):
            url = setup.http.base_url
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(b"POST %b HTTP/1.1\r\nhost: localhost\r\n" % path.encode())
            writer.write(b"authorization: Bearer adm\r\ncontent-length: 99\r\n\r\n{")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408 ")
            assert b'"code":"timeout"' in await reader.readuntil(b"}")
            writer.close()
            assert not replica.seen

    run(main)


def test_bodies_beyond_the_memory_are_refused() -> None:
    """A body counts until its answer begins, because until then it may be sent again."""

    async def main() -> None:
        replica = FakeReplica()
        replica.gate.set()
        large = b"x" * 90_000
        async with routed(replica, body_memory=60_000) as setup:
            replica.frozen = True

            async def ask() -> httpx.Response:
                return await setup.http.post("/v1/completions", content=large)

            held = [asyncio.create_task(ask()) for _ in range(2)]
            await setup.until(lambda: setup.app.proxy.bodies.used > 2 * 20_000)
            refused = await ask()
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "body_memory_full"
            replica.frozen = False
            assert {(await each).status_code for each in held} == {200}
            assert setup.app.proxy.bodies.used == 0
            assert (await ask()).status_code == 200

    run(main)


def test_all_share_a_limit_without_keys() -> None:
    keys = ClientKeys(None, requests_per_minute=1)

    async def main() -> None:
        replica = FakeReplica()
        replica.gate.set()
        async with routed(replica, keys=keys) as setup:
            assert (await setup.ask()).status_code == 200
            assert (await setup.ask()).status_code == 429

    run(main)
    keys.close()


def test_another_checkpoint_by_the_same_name_is_another_model() -> None:
    async def main() -> None:
        first, second, other = FakeReplica(), FakeReplica(), FakeReplica(checkpoint="b")
        async with routed(first) as setup, serving(second), serving(other):
            for replica, status in ((second, 200), (other, 409)):
                body = {"url": replica.url}
                answer = await setup.http.post("/replicas", json=body, headers=ADMIN)
                assert answer.status_code == status
            message = answer.json()["error"]["message"]
            assert message.endswith("serves fake (b), this router fake (a)")

    run(main)


def test_a_replica_that_comes_back_with_another_model_leaves_unless_it_is_alone() -> None:
    async def main() -> None:
        first, second = FakeReplica(), FakeReplica()
        second.gate.set()
        async with routed(first, second) as setup:
            changed, other = setup.fleet

            async def restart(replica: FakeReplica, known: RoutedReplica) -> None:
                replica.ready, replica.name = False, "other"
                await setup.until(lambda: not known.healthy)
                replica.ready = True

            await restart(first, changed)
            await setup.until(lambda: len(setup.fleet.replicas) == 1)
            assert list(setup.fleet) == [other]
            assert (other.healthy, other.leaving) == (True, False)
            assert (await setup.ask()).status_code == 200
            await restart(second, other)
            await setup.until(lambda: other.healthy)
            assert other.model is not None
            assert {entry.id for entry in other.model} == {"other"}
            # The replica that left serves the same model as the fleet by now.
            joined = await setup.http.post("/replicas", json={"url": first.url}, headers=ADMIN)
            assert joined.status_code == 200

    run(main)


def test_foreign_hosts_and_origins_are_refused_on_loopback() -> None:
    """A replica does not take the router's own page for another site's."""

    async def main() -> None:
        replica = FakeReplica()
        replica.gate.set()
        hosts = HostCheck(ServerArgs(cors_origins=("http://good.example",)))
        async with routed(replica, hosts=hosts) as setup:
            for path in ("/health", "/replicas", "/v1/models"):
                answer = await setup.http.get(path, headers={"host": "evil.example"})
                assert answer.status_code == 403
                assert answer.json()["error"]["code"] == "host_not_allowed"
            for host in ("localhost:8080", "10.0.0.1", "[::1]:80"):
                assert (await setup.ask(headers={"host": host})).status_code == 200
            for origin, status in (
                ("http://evil.example", 403),
                ("http://good.example", 200),
                ("http://localhost:8080", 200),
            ):
                headers = {"host": "localhost:8080", "origin": origin}
                assert (await setup.ask(headers=headers)).status_code == status
        seen = [sent.get("origin") for _, _, sent, _ in replica.seen]
        assert seen == [None, None, None, "http://good.example", None]

    run(main)


def test_addresses() -> None:
    async def main() -> None:
        fleet = Fleet(FleetSettings(check_seconds=0.02))
        for url in ("", "ftp://a", "http://", "http://a:b", "http://a/?x=1", "http://[::1", "a b"):
            with pytest.raises(ConfigError, match="is not an http address"):
                fleet.join(url)
        assert fleet.join("a:81") is fleet.join("http://a:81/") is fleet.join("a:81/v1")
        await fleet.close()

    run(main)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name the servers"),
        (["--admin-api-key", "k"], "replica_hosts names nobody"),
        (["--admin-api-key", "k", "--replica-hosts", "http://a"], "'http://a' is not HOST"),
        (["http://a", "--policy", "best"], "policy must be one of prefix, least-loaded"),
        (["http://a", "--api-key", "a b"], "api_key must be printable"),
        (["http://a", "--check-seconds", "inf"], "finite"),
        (["http://a", "--max-body-mb", "300"], "max_body_memory_mb=256 must be at least"),
        (["http://a", "--api-key-file", "/none"], "api_key_file: cannot read /none"),
    ],
)
def test_wrong_settings(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(command, ["route", *words], catch_exceptions=False)
