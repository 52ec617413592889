"""The process of one further rank: `python -m quire.engine.worker_process FD`.

FD is its end of a pipe. It does as it is told there, and ends when the pipe does.
"""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Connection

from quire.engine.features import features_at_start, hooks_of
from quire.engine.messages import Failure
from quire.engine.workers import (
    Allocate,
    Broken,
    Capture,
    Collect,
    Done,
    Measure,
    Run,
    Setup,
    decode_to_worker,
    encode,
    share,
)
from quire.errors import QuireError
from quire.parallel.torch_group import join_group
from quire.runner import ModelRunner


def serve(pipe: Connection) -> None:
    """Runs a worker until the pipe ends."""
    setup = decode_to_worker(pipe.recv_bytes())
    if not isinstance(setup, Setup):
        raise QuireError("a worker is made before anything else")
    hooks = hooks_of(features_at_start(setup.config, complete=True), setup.config)
    share(hooks, setup.config, setup.shared)
    group = join_group(setup.backend, setup.store, setup.rank, setup.world)
    worker = ModelRunner(setup.config, None, hooks, group)
    while True:
        match decode_to_worker(pipe.recv_bytes()):
            case Run(plan):
                worker.submit(plan)
            case Collect():
                worker.collect()
            case Measure():
                pipe.send_bytes(encode(Done(worker.measure())))
            case Allocate(num_blocks):
                worker.allocate(num_blocks)
                pipe.send_bytes(encode(Done()))
            case Capture():
                worker.capture()
                pipe.send_bytes(encode(Done()))
            case Setup():
                raise QuireError("a worker is made once")


def main(descriptor: int) -> None:
    # Ctrl-C reaches the whole process group; the engine decides when workers stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = Connection(descriptor)
    try:
        serve(pipe)
    except EOFError:
        pass
    except Exception as error:
        pipe.send_bytes(encode(Broken(Failure.of(error))))
        raise
    finally:
        os._exit(0)  # peers that have ended would be waited for


if __name__ == "__main__":
    main(int(sys.argv[1]))
