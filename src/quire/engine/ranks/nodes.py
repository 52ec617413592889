"""Several machines: the workers of other machines connect to the engine and run its plans.

Machine 0 has the engine's process and the last stages. The other machines have whole stages before
them. Plans travel over TCP in the same messages as through pipes, and hidden states through the
ranks' process group. The port accepts any worker that connects, so it must be in a private network.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from quire.config import EngineArgs, EngineConfig
from quire.engine.ranks.ranks import config_of_rank, ranks_of_node
from quire.engine.ranks.remote_worker import (
    RemoteWorker,
    Setup,
    WorkerConnected,
    decode_from_worker,
    encode,
    start_process,
)
from quire.errors import ConfigError, EngineDeadError

logger = logging.getLogger("quire.engine")

_WAIT = 600.0
"""Seconds within which the workers of all machines must connect."""
_HELLO = 10
"""Seconds within which a connection must send `WorkerConnected`."""
_GLANCE = 1.0
"""Seconds between two checks during a wait."""
_LEAVE = 5.0
"""Seconds that a machine's other workers get to end after one has ended."""
_AGAIN = 0.5
"""Seconds between two attempts to reach the engine."""
_SILENCE = 10
"""Seconds of silence after which TCP probes the other machine."""


def rendezvous_of(args: EngineArgs) -> str:
    """Returns the URL where the ranks of all machines find each other."""
    return f"tcp://{args.master_addr}:{args.master_port + 1}"


def accept_workers(
    config: EngineConfig, world: int, timeout: float, check: Callable[[], None] = lambda: None
) -> list[RemoteWorker]:
    """Waits until the workers of all other machines have connected, and returns them.

    Args:
        world: number of ranks.
        timeout: see `Setup`.
        check: called at least once a second. It raises an error to end the wait.

    Raises:
        ConfigError: the address is not this machine's, or the port is taken.
        EngineDeadError: some workers have not connected within ten minutes.
    """
    args, each = config.args, ranks_of_node(config, world)
    found: dict[int, Connection] = {}
    deadline = time.monotonic() + _WAIT
    with _listen(args) as server:
        logger.info("waiting for the %d workers of other machines", world - each)
        server.settimeout(_GLANCE)
        while len(found) < world - each:
            check()
            try:
                accepted, address = server.accept()
            except TimeoutError:
                if time.monotonic() < deadline:
                    continue
                missing = sorted(set(range(each, world)) - found.keys())
                raise EngineDeadError(f"workers of ranks {missing} have not connected") from None
            accepted.settimeout(None)
            _keep_alive(accepted)
            pipe = Connection(os.dup(accepted.fileno()))
            _limit_reads(accepted, _HELLO)
            here = _introduced(pipe)
            _limit_reads(accepted, 0)
            accepted.close()
            if here is None or not (0 < here.node_rank < args.nnodes and 0 <= here.index < each):
                logger.warning("a connection from %s is not a worker of this engine", address[0])
                pipe.close()
                continue
            rank = here.node_rank * each + here.index
            if rank in found:  # The worker was started again.
                found[rank].close()
            found[rank] = pipe
            drop_ended(found)
    return [
        RemoteWorker(
            Setup(config_of_rank(config, rank), rank, world, rendezvous_of(args), None, timeout),
            pipe,
        )
        for rank, pipe in sorted(found.items())
    ]


def run_node(args: EngineArgs) -> None:
    """Runs the workers of a machine other than machine 0. When the engine ends, it starts them
    again, until this process gets SIGTERM.

    Raises:
        ConfigError: the settings do not describe such a machine.
    """
    stages = args.pipeline_parallel_size
    if not 0 < args.node_rank < args.nnodes or stages % args.nnodes:
        raise ConfigError(
            f"node_rank={args.node_rank} with nnodes={args.nnodes} and {stages} stages is invalid: "
            "node_rank must be in [1, nnodes), and nnodes must divide the stages",
            "node_rank",
        )
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    while True:
        workers: list[subprocess.Popen[bytes]] = []
        try:
            for index in range(args.ranks // args.nnodes):
                workers.append(_start(args, index))
            logger.info("%d workers of machine %d run", len(workers), args.node_rank)
            wait_for_end(workers)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


def wait_for_end(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Waits until a worker has ended, and then up to `_LEAVE` seconds for the others.

    All workers start again together, because the engine waits until every one has connected.
    """
    poller = select.poll()
    with contextlib.ExitStack() as opened:
        for worker in workers:
            descriptor = os.pidfd_open(worker.pid)
            opened.callback(os.close, descriptor)
            poller.register(descriptor, select.POLLIN)
        poller.poll()
    deadline = time.monotonic() + _LEAVE
    with contextlib.suppress(subprocess.TimeoutExpired):
        for worker in workers:
            worker.wait(max(0.0, deadline - time.monotonic()))


def _start(args: EngineArgs, index: int) -> subprocess.Popen[bytes]:
    """Connects a worker to the engine, for which it waits, and starts its process."""
    logger.info("waiting for the engine at %s:%d", args.master_addr, args.master_port)
    with connect(args.master_addr, args.master_port, args.node_rank, index) as pipe:
        return start_process(pipe.fileno())


def connect(address: str, port: int, node_rank: int, index: int) -> Connection:
    """Connects a worker to the engine, and waits until the engine listens.

    Args:
        address: The engine's host.
        port: The engine's port.
        node_rank: Number of the worker's machine.
        index: Number of the worker on its machine.
    """
    while True:
        connected = None
        try:
            connected = socket.create_connection((address, port))
            # If nobody listens at the port, the system may give it to this socket, which is then
            # connected to itself.
            if connected.getsockname() != connected.getpeername():
                connected.settimeout(None)
                _keep_alive(connected)
                pipe = Connection(os.dup(connected.fileno()))
                pipe.send_bytes(encode(WorkerConnected(node_rank, index)))
                return pipe
        except OSError:
            # The engine does not listen yet, or has ended.
            time.sleep(_AGAIN)
        finally:
            if connected is not None:
                connected.close()


def drop_ended(found: dict[int, Connection]) -> None:
    """Forgets workers whose connections have ended during the wait. They connect again."""
    for rank, pipe in list(found.items()):
        poller = select.poll()
        poller.register(pipe.fileno(), select.POLLRDHUP)
        if poller.poll(0):
            found.pop(rank).close()


def _listen(args: EngineArgs) -> socket.socket:
    try:
        return socket.create_server((args.master_addr, args.master_port), reuse_port=False)
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {args.master_addr}:{args.master_port} ({error.strerror}); "
            "master_addr is the address of the machine with node_rank=0",
            "master_addr",
        ) from error


def _introduced(pipe: Connection) -> WorkerConnected | None:
    """Returns the worker's first message; None if it is missing or invalid."""
    try:
        message = decode_from_worker(pipe.recv_bytes(1024)) if pipe.poll(_HELLO) else None
    except (OSError, EOFError, ValueError):
        return None
    return message if isinstance(message, WorkerConnected) else None


def _limit_reads(connected: socket.socket, seconds: int) -> None:
    """Limits the seconds that a read may wait, including a `Connection`'s reads; 0: no limit."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _keep_alive(connected: socket.socket) -> None:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENCE // 3)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
