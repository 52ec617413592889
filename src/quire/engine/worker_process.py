"""The process of one further rank: `python -m quire.engine.worker_process FD`.

FD is its end of a pipe. It does as it is told there, and ends when the pipe does.
"""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Connection

import torch

from quire.engine.builder import runner_hooks
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
)
from quire.errors import QuireError
from quire.parallel import join_group
from quire.runner import ModelRunner


def serve(pipe: Connection) -> None:
    """Runs a worker until the pipe ends."""
    setup = decode_to_worker(pipe.recv_bytes())
    if not isinstance(setup, Setup):
        raise QuireError("a worker is made before anything else")
    masks = setup.masks.ring(torch.device(setup.config.device))
    group = join_group(setup.backend, setup.store, setup.rank, setup.world)
    worker = ModelRunner(setup.config, None, runner_hooks(), group, masks)
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
