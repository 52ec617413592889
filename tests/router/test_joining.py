"""Servers join a fleet, and only some of them get the replicas' key."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from quire.errors import ConfigError
from quire.router.client_keys import ClientKeys
from quire.router.replica_hosts import ReplicaHosts, ReplicaNotAllowedError
from quire.server.app import build_app
from quire.server.args import ServerArgs
from quire.server.context.api_keys import digest_of
from quire.server.http.replica_proofs import CHALLENGE_HEADER, PROOF_HEADER, Challenge, prove
from tests.router.fake_replica import FakeReplica, serving
from tests.router.hostile_replica import HostileReplica, hostile
from tests.router.test_routing import ADMIN, Setup, routed, run
from tests.server.fakes import FakeClient

KEY = "replicas-key"


async def join(setup: Setup, url: str) -> httpx.Response:
    return await setup.http.post("/replicas", json={"url": url}, headers=ADMIN)


def test_the_key_is_sent_to_replicas_that_prove_they_have_it() -> None:
    async def main() -> None:
        named, joining = FakeReplica(key=KEY), FakeReplica(key=KEY)
        async with routed(named, key=KEY) as setup, serving(joining):
            assert (await join(setup, joining.url)).status_code == 200
            assert set(joining.keys_seen) == {f"Bearer {KEY}"}
            # Another server at the address has not proved anything.
            known = [each for each in setup.fleet if not each.trusted]
            assert [each.proven for each in known] == [True]
            joining.key = None
            await setup.until(lambda: known[0].health == "lost")
            seen = len(joining.keys_seen)
            await asyncio.sleep(0.1)
            assert len(joining.keys_seen) == seen
            joining.key = KEY
            await setup.until(lambda: known[0].healthy)

    run(main)


@pytest.mark.parametrize(
    "impostor", [FakeReplica(), FakeReplica(key="other"), FakeReplica(key=KEY, other_place=True)]
)
def test_the_key_is_sent_to_no_impostor(
    impostor: FakeReplica, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with routed(FakeReplica(key=KEY), key=KEY) as setup, serving(impostor):
            refused = await join(setup, impostor.url)
            assert refused.status_code == 502
            assert impostor.keys_seen == []
            assert "does not prove" in caplog.text
            # The router's settings can trust it by its address.
            setup.fleet.hosts.trust("127.0.0.1", int(impostor.url.rpartition(":")[2]))
            await join(setup, impostor.url)
            assert impostor.keys_seen

    run(main)


def test_addresses_that_are_not_allowed_are_not_contacted() -> None:
    async def main() -> None:
        replica, other = FakeReplica(), FakeReplica()
        async with routed(replica, replica_hosts=()) as setup, serving(other):
            refused = await join(setup, other.url)
            assert refused.status_code == 403
            assert refused.json()["error"]["code"] == "replica_not_allowed"
            assert "--replica-hosts" in refused.json()["error"]["message"]
            assert other.server.server_state.total_requests == 0
            # A replica from the settings may leave and come back.
            assert (await join(setup, replica.url)).status_code == 200

    run(main)


def test_answers_do_not_reveal_what_listens_on_a_port() -> None:
    async def main() -> None:
        other = HostileReplica(lambda *_: b"SSH-2.0\r\n")
        other.questions = (b"/ready",)
        async with routed(FakeReplica()) as setup, hostile(other) as url:
            messages = set()
            for address in (url, "http://127.0.0.1:1"):
                refused = await join(setup, address)
                assert refused.status_code == 502
                messages.add(refused.json()["error"]["message"].removeprefix(address))
            assert len(messages) == 1

    run(main)


def test_a_server_proves_the_keys_of_admins() -> None:
    async def main() -> None:
        app = build_app(FakeClient(), ServerArgs(api_key=(KEY,)))  # type: ignore[arg-type]
        async with serving(app) as url, httpx.AsyncClient() as http:
            place = "127.0.0.1", int(url.rpartition(":")[2])
            for key, met in ((KEY, True), ("other", False)):
                challenge = Challenge(digest_of(key.encode()))
                headers = {CHALLENGE_HEADER.decode(): challenge.header.decode()}
                answer = await http.get(f"{url}/ready", headers=headers)
                assert answer.status_code == 200
                proof = answer.headers.get(PROOF_HEADER.decode())
                assert (proof is not None) == met
                if proof is not None:
                    assert challenge.is_met(proof.encode(), place)
                    assert challenge.is_met(proof.encode(), (f"::ffff:{place[0]}", place[1]))
                    assert not challenge.is_met(proof.encode(), (place[0], place[1] + 1))
                    assert not challenge.is_met(proof.encode(), None)
                    assert not Challenge(digest_of(key.encode())).is_met(proof.encode(), place)
            for wrong in ("", "x" * 97, "é"):
                answer = await http.get(
                    f"{url}/ready", headers={CHALLENGE_HEADER.decode(): wrong.encode("latin-1")}
                )
                assert answer.status_code == 200
                assert PROOF_HEADER.decode() not in answer.headers

    run(main)
    challenge = Challenge(b"digest").header
    assert prove(challenge, [b"digest"], ("/run/socket", None)) is None


@pytest.mark.parametrize(
    ("entries", "allowed", "refused"),
    [
        ([], [], ["10.0.0.1"]),
        (["10.0.0.1"], ["10.0.0.1"], ["10.0.0.2", "a.10.0.0.1", "::1"]),
        (["10.0.0.0/24", "fd00::/8"], ["10.0.0.9", "fd00::1"], ["10.0.1.1", "fe80::1", "a.de"]),
        (
            ["*.example.com"],
            ["a.example.com", "a.b.example.com"],
            ["example.com", "badexample.com"],
        ),
        (["Host.example"], ["host.example"], ["other.example"]),
        (["[::1]:8000", "a.de:8000"], [], ["::1", "a.de"]),
        (["*"], ["10.0.0.1", "a.de"], []),
    ],
)
def test_hosts(entries: list[str], allowed: list[str], refused: list[str]) -> None:
    hosts = ReplicaHosts(entries)
    for host in allowed:
        hosts.check(host, 80)
        assert not hosts.trusts(host, 80)
    for host in refused:
        with pytest.raises(ReplicaNotAllowedError, match="--replica-hosts"):
            hosts.check(host, 80)
        hosts.trust(host, 80)
        hosts.check(host, 80)
    for entry in entries:
        if entry.endswith(":8000"):
            host = entry.removesuffix(":8000").strip("[]")
            assert hosts.trusts(host, 8000)


@pytest.mark.parametrize("entry", ["", "a b", "http://a", "a/b", "10.0.0.0/99", "a:99999", "u@a"])
def test_invalid_host_entries_are_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"replica_hosts: .* is not HOST"):
        ReplicaHosts([entry])


def test_the_replica_list_needs_a_key() -> None:
    keys = ClientKeys(None, requests_per_minute=100)

    async def main() -> None:
        for settings, sent in (
            ({"key": KEY}, KEY),
            ({"key": KEY}, "adm"),
            ({"keys": keys}, "adm"),
        ):
            async with routed(FakeReplica(), **settings) as setup:  # type: ignore[arg-type]
                for path in ("/metrics", "/replicas"):
                    for wrong in ({}, {"authorization": "Bearer x"}, {"authorization": sent}):
                        refused = await setup.http.get(path, headers=wrong)
                        assert refused.status_code == 401
                    right = {"authorization": f"Bearer {sent}"}
                    assert (await setup.http.get(path, headers=right)).status_code == 200
                object.__setattr__(setup.app, "public_metrics", True)
                assert (await setup.http.get("/metrics")).status_code == 200
                object.__setattr__(setup.app, "admin_key", None)
                if "key" not in settings:
                    assert (await setup.http.get("/replicas")).status_code == 200

    run(main)
    keys.close()
