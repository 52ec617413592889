"""The process of one rank: `python -m quire.engine.ranks.worker_process FD OWNER`.

FD is its end of a pipe. The process carries out the messages from the pipe, and ends when the pipe
is closed. OWNER is the id of the process that started it. Unless OWNER is 0, the kernel ends this
process with its owner.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import threading
import traceback
from collections import deque
from multiprocessing.connection import Connection

from quire.engine.loop.features import features_at_start, hooks_of
from quire.engine.loop.messages import Failure
from quire.engine.ranks.ranks import draws_tokens, open_worker, ranks_of_node
from quire.engine.ranks.remote_worker import (
    Allocate,
    Capture,
    Collect,
    Measure,
    Run,
    Setup,
    WorkerFailed,
    WorkerReply,
    WorkerShutdown,
    decode_to_worker,
    encode,
)
from quire.engine.ranks.shared_memory import FlightRecorder, share
from quire.errors import QuireError
from quire.parallel.torch_group import leave_group
from quire.runner import Hook
from quire.system import end_with


def serve(pipe: Connection) -> None:
    """Runs a worker until the pipe ends."""
    setup = decode_to_worker(pipe.recv_bytes())
    if not isinstance(setup, Setup):
        raise QuireError("the first message to a worker must be Setup")
    config, rank, world = setup.config, setup.rank, setup.world
    hooks: list[Hook] = []
    if draws_tokens(config, rank, world) and setup.folder is not None:
        hooks = hooks_of(features_at_start(config, complete=True), config)
        share(hooks, config, setup.folder, create=False)
    recorder = FlightRecorder(
        setup.folder, world if setup.folder is None else ranks_of_node(config, world)
    )
    group, worker = open_worker(config, setup.rendezvous, rank, world, setup.timeout, hooks=hooks)
    launched: deque[int] = deque()
    while True:
        match decode_to_worker(pipe.recv_bytes()):
            case Run(plan):
                recorder.launched(rank, plan.step_id)
                launched.append(plan.step_id)
                worker.submit(plan)
            case Collect():
                result = worker.collect()
                step_id = launched.popleft()
                recorder.read(rank, step_id, result.gpu_us)
                group.check(step_id)
            case Measure():
                pipe.send_bytes(encode(WorkerReply(worker.measure())))
            case Allocate(num_blocks):
                worker.allocate(num_blocks)
                pipe.send_bytes(encode(WorkerReply()))
            case Capture():
                worker.capture()
                recorder.holds(rank, worker)
                if config.device != "cpu" and not config.eager:
                    group.started()
                # The loaded objects live until the end, so the garbage collector need not scan
                # them.
                gc.collect()
                gc.freeze()
                pipe.send_bytes(encode(WorkerReply()))
            case WorkerShutdown():
                worker.shutdown()
                leave_group()
                return
            case Setup():
                raise QuireError("a worker takes Setup only once")


def _end_with(pipe: Connection) -> None:
    """Ends this process when its pipe is closed, even while it waits for other ranks."""

    def watch() -> None:
        poller = select.poll()
        poller.register(pipe.fileno(), select.POLLRDHUP)
        poller.poll()
        os._exit(0)

    threading.Thread(target=watch, daemon=True, name="pipe-watch").start()


def main(descriptor: int, owner: int = 0) -> None:
    # Ctrl-C reaches the whole process group; the engine decides when workers stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = Connection(descriptor)
    _end_with(pipe)
    if owner:
        end_with(owner)
    status = 0
    try:
        serve(pipe)
    except EOFError:
        pass
    except Exception as error:
        status = 1
        if isinstance(error, QuireError):
            # The engine may wait for other ranks, and not read this worker's message.
            sys.stderr.write(f"a worker has failed: {error}\n")
        else:
            traceback.print_exc()
        pipe.send_bytes(encode(WorkerFailed(Failure.of(error))))
    finally:
        sys.stderr.flush()
        os._exit(status)  # A normal exit would wait for ranks that have ended.


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
