"""Several machines: the workers of others connect to the engine, which tells them what to do.

Machine 0 has the last stages, and among them the engine's process; others have whole stages before
them. Plans travel over TCP as they travel through pipes, and hidden states through the ranks' own
group. Whoever reaches the port may become a worker, so it belongs in a network of its own.
"""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection

from quire.config import EngineArgs, EngineConfig
from quire.engine.ranks import config_of_rank, ranks_of_node
from quire.engine.remote_worker import RemoteWorker, start_process
from quire.engine.worker_messages import Here, Setup, decode_from_worker, encode
from quire.errors import ConfigError, EngineDeadError

logger = logging.getLogger("quire.engine")

_WAIT = 600.0
"""Seconds within which all machines must have come."""
_HELLO = 10.0
"""Seconds within which who connects must say who it is."""
_AGAIN = 0.5
"""Seconds between two tries to reach the engine."""
_SILENCE = 10
"""Seconds of silence after which TCP asks whether the other machine is there, and gives it up."""


def rendezvous_of(args: EngineArgs) -> str:
    """Returns the URL where the ranks of all machines find each other."""
    return f"tcp://{args.master_addr}:{args.master_port + 1}"


def accept_workers(config: EngineConfig, world: int, timeout: float) -> list[RemoteWorker]:
    """Waits for the workers of all other machines, and makes them. timeout: see `Setup`.

    Raises:
        ConfigError: the address is not this machine's, or the port is taken.
        EngineDeadError: some have not come within ten minutes.
    """
    args, each = config.args, ranks_of_node(config, world)
    found: dict[int, Connection] = {}
    deadline = time.monotonic() + _WAIT
    with _listen(args) as server:
        logger.info("waiting for the %d workers of other machines", world - each)
        while len(found) < world - each:
            server.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                accepted, address = server.accept()
            except TimeoutError:
                missing = sorted(set(range(each, world)) - found.keys())
                raise EngineDeadError(f"the workers of ranks {missing} have not come") from None
            accepted.settimeout(None)
            _keep_alive(accepted)
            pipe = Connection(accepted.detach())
            here = _introduced(pipe)
            if here is None or not (0 < here.node_rank < args.nnodes and 0 <= here.index < each):
                logger.warning("who connected from %s is no worker of this engine", address[0])
                pipe.close()
                continue
            rank = here.node_rank * each + here.index
            if rank in found:  # a worker that was started again
                found[rank].close()
            found[rank] = pipe
    return [
        RemoteWorker(
            Setup(config_of_rank(config, rank), rank, world, rendezvous_of(args), None, timeout),
            pipe,
        )
        for rank, pipe in sorted(found.items())
    ]


def run_node(args: EngineArgs) -> None:
    """Runs the workers of a machine that is not the first, and again when the engine has ended,
    until this process is told to end.

    Raises:
        ConfigError: the settings are not those of such a machine.
    """
    if not 0 < args.node_rank < args.nnodes or args.ranks % args.nnodes:
        raise ConfigError(
            f"node_rank={args.node_rank} of nnodes={args.nnodes} with {args.ranks} ranks is no "
            "machine",
            "node_rank",
        )
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    while True:
        workers: list[subprocess.Popen[bytes]] = []
        try:
            for index in range(args.ranks // args.nnodes):
                workers.append(_start(args, index))
            logger.info("%d workers of machine %d run", len(workers), args.node_rank)
            for worker in workers:
                worker.wait()
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


def _start(args: EngineArgs, index: int) -> subprocess.Popen[bytes]:
    """Connects a worker to the engine, for which it waits, and starts its process."""
    logger.info("waiting for the engine at %s:%d", args.master_addr, args.master_port)
    while True:
        try:
            connected = socket.create_connection((args.master_addr, args.master_port))
            break
        except OSError:
            time.sleep(_AGAIN)
    connected.settimeout(None)
    _keep_alive(connected)
    with Connection(connected.detach()) as pipe:
        pipe.send_bytes(encode(Here(args.node_rank, index)))
        return start_process(pipe.fileno())


def _listen(args: EngineArgs) -> socket.socket:
    try:
        return socket.create_server((args.master_addr, args.master_port), reuse_port=False)
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {args.master_addr}:{args.master_port} ({error.strerror}); "
            "master_addr is the address of the machine with node_rank=0",
            "master_addr",
        ) from error


def _introduced(pipe: Connection) -> Here | None:
    """Returns what the other end says of itself, None if that is nothing, or nonsense."""
    try:
        message = decode_from_worker(pipe.recv_bytes(1024)) if pipe.poll(_HELLO) else None
    except (OSError, EOFError, ValueError):
        return None
    return message if isinstance(message, Here) else None


def _keep_alive(connected: socket.socket) -> None:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENCE // 3)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
