"""The executor of several ranks: the first worker in this process, others in their own."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Pipe
from typing import Any

import msgspec
import numpy as np

from quire.arrays import Int32, decode_array, encode_array
from quire.config import EngineConfig
from quire.engine.messages import Failure
from quire.errors import EngineDeadError
from quire.executor import Capacity, Measurement, OnProgress
from quire.parallel.torch_group import join_group, leave_group
from quire.plan import HeadInputs, StepPlan, StepResult
from quire.runner import Hook, ModelRunner
from quire.runner.model_runner import limits_of

_MEMORY = "/dev/shm"


class Setup(msgspec.Struct, tag=True):
    """Makes a worker.

    store: a file by which the ranks find each other. backend: of `torch.distributed`.
    shared: a file that holds the memory which all ranks share for each hook.
    """

    config: EngineConfig
    rank: int
    world: int
    store: str
    backend: str
    shared: str


class Measure(msgspec.Struct, tag=True):
    """Asks for a `Measurement`."""


class Allocate(msgspec.Struct, tag=True):
    """Makes the KV cache; answered by `Done`."""

    num_blocks: tuple[int, ...]


class Capture(msgspec.Struct, tag=True):
    """Gets the worker ready; answered by `Done`."""


class Run(msgspec.Struct, tag=True):
    """Launches a step; not answered."""

    plan: StepPlan


class Collect(msgspec.Struct, tag=True):
    """Waits for the oldest step; not answered, as all ranks have the same result."""


class Done(msgspec.Struct, tag=True):
    """Answers a call. measurement: of `Measure`."""

    measurement: Measurement | None = None


class Broken(msgspec.Struct, tag=True):
    """Says why a worker has ended."""

    failure: Failure


ToWorker = Setup | Measure | Allocate | Capture | Run | Collect
FromWorker = Done | Broken
_ENCODER = msgspec.msgpack.Encoder(enc_hook=encode_array)
_TO_WORKER = msgspec.msgpack.Decoder(ToWorker, dec_hook=decode_array)
_FROM_WORKER = msgspec.msgpack.Decoder(FromWorker, dec_hook=decode_array)


def share(hooks: Sequence[Hook], config: EngineConfig, path: str, *, create: bool = False) -> None:
    """Gives hooks their parts of the memory that all ranks map; the first rank makes the file."""
    limits = limits_of(config, hooks)
    sizes = [hook.shared_bytes(limits) for hook in hooks]
    if not sum(sizes):
        return
    memory = np.memmap(path, dtype=np.int8, mode="w+" if create else "r+", shape=(sum(sizes),))
    ends = itertools.accumulate(sizes)
    for hook, size, end in zip(hooks, sizes, ends, strict=True):
        if size:
            hook.share(memory[end - size : end])


def encode(message: ToWorker | FromWorker) -> bytes:
    return _ENCODER.encode(message)


def decode_to_worker(data: bytes) -> ToWorker:
    return _TO_WORKER.decode(data)  # type: ignore[no-any-return]


class RemoteWorker:
    """A rank in a process of its own, which ends when its pipe does."""

    def __init__(self, setup: Setup) -> None:
        self._rank = setup.rank
        self._pipe, theirs = Pipe()
        command = [sys.executable, "-m", "quire.engine.worker_process", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self.send(setup)

    def send(self, message: ToWorker) -> None:
        self._write(encode(message))

    def run(self, plan: bytes) -> None:
        """Launches a step from an encoded `Run`."""
        self._write(plan)

    def _write(self, data: bytes) -> None:
        try:
            self._pipe.send_bytes(data)
        except OSError as error:
            raise self._ended() from error

    def answer(self) -> Done:
        """Waits for the answer to the oldest call."""
        try:
            message: FromWorker = _FROM_WORKER.decode(self._pipe.recv_bytes())
        except EOFError as error:
            raise self._ended() from error
        if isinstance(message, Broken):
            raise message.failure.error()
        return message

    def check(self) -> None:
        """Raises what ended the worker, if it has ended."""
        if self._pipe.poll():
            self.answer()
        if self._process.poll() is not None:
            raise self._ended()

    def _ended(self) -> EngineDeadError:
        return EngineDeadError(f"the worker of rank {self._rank} has ended")

    def stop(self) -> None:
        """Ends the process. Idempotent."""
        self._pipe.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class WorkerExecutor:
    """Fans plans out to the workers of all ranks.

    world: ranks. All of them sample; the first's results are the engine's.
    local: the first rank's worker.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: OnProgress | None = None,
        hooks: Sequence[Hook] = (),
        world: int = 2,
    ) -> None:
        self._others: list[RemoteWorker] = []
        # Files there are memory, which a GPU can be given to read.
        place = _MEMORY if os.access(_MEMORY, os.W_OK) else None
        self._folder = tempfile.TemporaryDirectory(prefix="quire-", dir=place)
        shared = os.path.join(self._folder.name, "shared")
        share(hooks, config, shared, create=True)
        store = os.path.join(self._folder.name, "ranks")
        backend = "gloo" if config.device == "cpu" else "nccl"
        for rank in range(1, world):
            self._others.append(RemoteWorker(Setup(config, rank, world, store, backend, shared)))
        self.local = ModelRunner(config, progress, hooks, join_group(backend, store, 0, world))

    def start(self) -> Capacity:
        """Starts all ranks with as many blocks as the one with the least room has."""
        for other in self._others:
            other.send(Measure())
        found = [self.local.measure()]
        for other in self._others:
            measurement = other.answer().measurement
            if measurement is not None:
                found.append(measurement)
        blocks = tuple(min(counts) for counts in zip(*(m.num_blocks for m in found), strict=True))
        self._call(Allocate(blocks))
        self.local.allocate(blocks)
        self._await()
        self._call(Capture())
        capacity = self.local.capture()
        self._await()
        return capacity

    def _call(self, message: ToWorker) -> None:
        for other in self._others:
            other.send(message)

    def _await(self) -> None:
        for other in self._others:
            other.answer()

    def submit(self, plan: StepPlan) -> None:
        data = encode(Run(plan))
        for other in self._others:
            other.check()
            other.run(data)
        self.local.submit(plan)

    def mask_room(self, step_id: int, rows: int) -> Int32:
        return self.local.mask_room(step_id, rows)

    def submit_head(self, inputs: HeadInputs) -> None:
        self.local.submit_head(inputs)

    def collect(self) -> StepResult:
        self._call(Collect())
        return self.local.collect()

    def control(self, message: dict[str, Any]) -> Any:
        return self.local.control(message)

    def shutdown(self) -> None:
        for other in self._others:
            other.stop()
        self.local.shutdown()
        if self._others:
            self._others = []
            leave_group()
            self._folder.cleanup()
