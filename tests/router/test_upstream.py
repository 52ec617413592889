"""Connections to a replica: when they are reused, and when they are closed."""

from __future__ import annotations

import asyncio

import pytest

from quire.router.replica import RoutedReplica
from quire.router.upstream import ReplicaLostError, UnreachableError, Upstream
from tests.router.fake_replica import FakeReplica, serving
from tests.router.test_routing import run

LARGE = b"x" * ((1 << 18) + 100)
"""The read with which reading is paused has the end, too."""


def test_a_connection_that_is_not_read_from_is_not_kept() -> None:
    """The end of a large answer has arrived, but is still unread."""

    async def main() -> None:
        length = (b"content-length", b"%d" % len(LARGE))
        replica = FakeReplica(parts=(LARGE,), headers=(length,))
        async with serving(replica) as url, asyncio.timeout(10):
            upstream = Upstream(url, 2.0)
            for _ in range(2):
                answer = await upstream.send("GET", b"/", [], b"")
                while not answer._connection.complete:
                    await asyncio.sleep(0.01)
                assert not answer._connection.reusable
                answer.close()
            replica.parts, replica.headers = (b"short",), ((b"content-length", b"5"),)
            for _ in range(2):
                answer = await upstream.send("GET", b"/", [], b"")
                while not answer._connection.complete:
                    await asyncio.sleep(0.01)
                answer.close()
            assert len(upstream._idle) == 1  # a little that is left does no harm
            upstream.close()

    run(main)


def test_requests_are_given_up_where_nothing_is_heard_for_some_looks() -> None:
    async def main() -> None:
        replica = FakeReplica(parts=(b"short",), headers=((b"content-length", b"5"),))
        async with serving(replica) as url, asyncio.timeout(10):
            known = RoutedReplica(0, Upstream(url, 2.0))
            answer = await known.upstream.send("GET", b"/", [], b"")
            assert [part async for part in answer.parts()] == [b"short"]
            answer.close()
            replica.frozen = True
            waiting = asyncio.create_task(known.upstream.send("GET", b"/", [], b""))
            await asyncio.sleep(0.05)
            for _ in range(3):  # of the first of them something was heard before
                known.mark_unreachable("it does not accept connections")
                await asyncio.sleep(0)
            assert not waiting.done()
            known.mark_unreachable("it does not accept connections")
            # The request is not sent again on a fresh connection, unlike after a closed one.
            with pytest.raises(ReplicaLostError):
                await waiting
            replica.frozen = False
            with pytest.raises(UnreachableError, match="does not accept connections"):
                await Upstream(url, 0.0).send("GET", b"/", [], b"")

    run(main)
