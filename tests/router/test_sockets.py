"""WebSockets through the router."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from quire.router.client_keys import ClientKeys
from quire.server.args import ServerArgs
from quire.server.http.hosts import HostCheck
from quire.server.http.websocket import WebSocketProtocol
from tests.router.fake_replica import FakeReplica
from tests.router.test_routing import ADMIN, Setup, routed, run

LONG = "a long system prompt. " * 100


@contextlib.asynccontextmanager
async def connected(setup: Setup, **headers: str) -> AsyncIterator[ClientConnection]:
    url = str(setup.http.base_url).replace("http", "ws") + "/v1/responses"
    async with connect(url, additional_headers=headers, proxy=None) as client:
        yield client


async def turn(client: ClientConnection, **fields: Any) -> list[dict[str, Any]]:
    """Sends a turn, and returns its events."""
    await client.send(json.dumps({"type": "response.create", **fields}))
    events = [json.loads(await client.recv())]
    while events[-1]["type"] not in ("response.completed", "error"):
        events.append(json.loads(await client.recv()))
    return events


def test_turns_pass_unchanged_and_stay_on_one_replica() -> None:
    async def main() -> None:
        first, second = FakeReplica(), FakeReplica()
        async with routed(first, second) as setup:
            async with connected(setup, Authorization="Bearer k") as client:
                for number in range(4):
                    created, completed = await turn(client, input=f"é {number}")
                    assert created["response"]["echo"]["input"] == f"é {number}"
                    assert completed["type"] == "response.completed"
                used = first if first.turns else second
                assert len(used.turns) == 4
                assert len(first.turns) + len(second.turns) == 4
                handshake = used.sockets[0]
                assert handshake["authorization"] == "Bearer k"
                assert handshake["host"] == used.url.partition("//")[2]
                assert handshake["x-forwarded-for"] == "127.0.0.1"
                assert (
                    "quire_router_websockets 1.0"
                    in (await setup.http.get("/metrics", headers=ADMIN)).text
                )
            await setup.until(lambda: not used.open)
            assert all(not replica.state.running for replica in setup.fleet)

    run(main)


def test_conversations_go_where_their_prompt_is() -> None:
    async def main() -> None:
        first, second = FakeReplica(), FakeReplica()
        async with routed(first, second) as setup:
            seen = []
            for _ in range(4):
                async with connected(setup) as client:
                    await turn(client, input=LONG)
                    seen.append((len(first.turns), len(second.turns)))
            assert 0 in seen[-1]  # the prompt's beginning is on one replica only

    run(main)


def test_new_conversations_are_shared_out_in_turn() -> None:
    async def main() -> None:
        first, second = FakeReplica(), FakeReplica()
        async with routed(first, second, policy="round-robin") as setup:
            for _ in range(4):
                async with connected(setup) as client:
                    await turn(client, input="a")
            assert (len(first.turns), len(second.turns)) == (2, 2)

    run(main)


def test_a_stored_response_is_found_on_any_replica() -> None:
    async def main() -> None:
        first, second = FakeReplica(), FakeReplica(stored=("resp_1",))
        async with routed(first, second) as setup:
            for _ in range(3):
                async with connected(setup) as client:
                    events = await turn(client, input="a", previous_response_id="resp_1")
                    assert events[-1]["type"] == "response.completed"
            async with connected(setup) as client:
                (error,) = await turn(client, input="a", previous_response_id="resp_2")
                assert error["error"]["code"] == "previous_response_not_found"
                assert (await turn(client, input="a"))[-1]["type"] == "response.completed"
            assert all(not replica.state.running for replica in setup.fleet)

    run(main)


def test_a_lost_replica() -> None:
    async def main() -> None:
        first, second = FakeReplica(), FakeReplica()
        async with routed(first, second) as setup:
            async with connected(setup) as client:
                await turn(client, input="a")
                used, other = (first, second) if first.turns else (second, first)
                used.die()
                with pytest.raises(ConnectionClosed) as closed:
                    await turn(client, input="b")
                assert closed.value.rcvd is not None
                assert closed.value.rcvd.code == 1011
            async with connected(setup) as client:
                await turn(client, input="b")
            assert len(other.turns) == 1
            other.die()
            await setup.until(lambda: not any(r.healthy for r in setup.fleet))
            with pytest.raises(InvalidStatus) as refused:
                async with connected(setup):
                    pass
            assert refused.value.response.status_code == 503

    run(main)


def test_a_replica_that_leaves_ends_its_connections_between_turns() -> None:
    async def main() -> None:
        first, second = FakeReplica(), FakeReplica()
        async with routed(first, second) as setup, connected(setup) as client:
            await turn(client, input="a")
            used = next(r for r in setup.fleet if r.upstream.url == (
                first if first.turns else second).url)  # fmt: skip
            setup.fleet.dismiss(used.name)
            with pytest.raises(ConnectionClosed) as closed:
                await turn(client, input="b")
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1012

    run(main)


def test_handshakes_that_a_replica_refuses() -> None:
    async def main() -> None:
        replica = FakeReplica(status=401)
        async with routed(replica) as setup:
            with pytest.raises(InvalidStatus) as refused:
                async with connected(setup):
                    pass
            assert refused.value.response.status_code == 401
            assert refused.value.response.body == b"refused"

    run(main)


def test_keys_and_limits(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[a]\nkey = "k"\nrequests_per_minute = 2\ntokens_per_minute = 1000\n')
    file.chmod(0o600)

    async def main() -> None:
        async with routed(FakeReplica(), keys=ClientKeys(str(file))) as setup:
            with pytest.raises(InvalidStatus) as refused:
                async with connected(setup):
                    pass
            assert refused.value.response.status_code == 401
            async with connected(setup, Authorization="Bearer k") as client:
                (error,) = await turn(client, input="a", max_output_tokens=2000)
                assert (error["status"], error["error"]["code"]) == (429, "rate_limit_exceeded")
                assert (await turn(client, input="a"))[-1]["type"] == "response.completed"

    async def second() -> None:
        async with (
            routed(FakeReplica(), keys=ClientKeys(str(file))) as setup,
            connected(setup, Authorization="Bearer k") as client,
        ):
            assert (await turn(client, input="a"))[-1]["type"] == "response.completed"
            assert (await turn(client, input="a"))[-1]["type"] == "response.completed"
            (error,) = await turn(client, input="a")
            assert error["status"] == 429

    run(main)
    run(second)


def test_a_first_message_that_is_no_text() -> None:
    async def main() -> None:
        async with routed(FakeReplica()) as setup, connected(setup) as client:
            await client.send(b"a")
            with pytest.raises(ConnectionClosed) as closed:
                await client.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1003

    run(main)


def test_the_router_stops_before_the_first_turn() -> None:
    async def main() -> None:
        async with routed(FakeReplica()) as setup, connected(setup) as client:
            (connection,) = sockets_of(setup)
            connection.shutdown()
            with pytest.raises(ConnectionClosed) as closed:
                await client.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1012

    run(main)


def sockets_of(setup: Setup) -> list[Any]:
    """Returns the router's open WebSockets."""
    connections = setup.server.server_state.connections
    return [each for each in connections if isinstance(each, WebSocketProtocol)]


def test_pages_of_other_origins_and_loops() -> None:
    async def main() -> None:
        async with routed(FakeReplica(), hosts=HostCheck(ServerArgs())) as setup:
            for headers, status in (
                ({"Origin": "https://evil.example"}, 403),
                ({"Via": setup.fleet.via.decode()}, 508),
            ):
                with pytest.raises(InvalidStatus) as refused:
                    async with connected(setup, **headers):
                        pass
                assert refused.value.response.status_code == status

    run(main)


def test_the_router_stops_after_running_turns() -> None:
    async def main() -> None:
        replica = FakeReplica()
        replica.waits = True
        async with routed(replica) as setup, connected(setup) as client:
            await client.send(json.dumps({"type": "response.create", "input": "a"}))
            assert json.loads(await client.recv())["type"] == "response.created"
            (connection,) = sockets_of(setup)
            connection.shutdown()
            await asyncio.sleep(0.05)
            replica.gate.set()
            assert json.loads(await client.recv())["type"] == "response.completed"
            with pytest.raises(ConnectionClosed) as closed:
                await client.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1012

    run(main)
