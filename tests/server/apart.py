"""A fork server with processes that cannot map peers' memory, as on another host.

These receive blocks over connections. If they read a peer's cache directly, they read blocks after
the steps that fill them.
"""

from __future__ import annotations

import os
import socket
import sys

from quire.features.disaggregation import peer_list, pulls
from quire.features.disaggregation.messages import MemoryHandle
from tests import fork_server

APART = "QUIRE_TESTS_APART"
"""Set in the environment of processes that map no memory."""
COMMAND = [sys.executable, "-m", "tests.server.apart"]


def use() -> None:
    """Makes this process start Quire's processes by forks, as `fork_server.use` does."""
    fork_server._COMMAND[:] = COMMAND
    fork_server.use()


def _main(connection: socket.socket) -> None:
    map_memory = pulls.map_memory

    def map_unless_apart(handle: MemoryHandle) -> pulls.PeerMemory | None:
        return None if APART in os.environ else map_memory(handle)

    sees_clock = peer_list.sees_clock

    def sees_unless_apart(source: bytes) -> bool:
        return APART not in os.environ and sees_clock(source)

    pulls.map_memory = map_unless_apart
    peer_list.sees_clock = sees_unless_apart
    fork_server._main(connection)


if __name__ == "__main__":
    from tests.server import apart

    apart._main(socket.socket(fileno=int(sys.argv[1])))
