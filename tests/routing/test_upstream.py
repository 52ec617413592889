"""Connections to a replica: which of them are kept."""

from __future__ import annotations

import asyncio

from quire.routing.upstream import Upstream
from tests.routing.fake_replica import FakeReplica, serving
from tests.routing.test_routing import run

LARGE = b"x" * ((1 << 18) + 100)
"""The read with which reading is paused has the end, too."""


def test_a_connection_that_is_not_read_from_is_not_kept() -> None:
    """The end of a large answer has come, but nobody has read it."""

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
