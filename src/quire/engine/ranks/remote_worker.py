"""A rank in another process, and the messages to it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from multiprocessing.connection import Connection, Pipe

import msgspec

from quire.arrays import decode_array, encode_array
from quire.config import EngineConfig
from quire.engine.loop.messages import Failure
from quire.engine.processes import thread_variables
from quire.errors import EngineDeadError
from quire.executor import Measurement
from quire.plan import StepPlan
from quire.system import python_command


class Setup(msgspec.Struct, tag=True):
    """Makes a worker.

    Attributes:
        config: The engine's configuration, with the rank's own device.
        rank: The worker's rank.
        world: Number of ranks.
        rendezvous: URL where the ranks find each other.
        folder: Folder of the shared memory on the engine's machine; None on other machines.
        timeout: Most seconds of a step.
    """

    config: EngineConfig
    rank: int
    world: int
    rendezvous: str
    folder: str | None
    timeout: float


class Measure(msgspec.Struct, tag=True):
    """Asks for a `Measurement`."""


class Allocate(msgspec.Struct, tag=True):
    """Makes the KV cache; answered by `WorkerReply`."""

    num_blocks: tuple[int, ...]


class Capture(msgspec.Struct, tag=True):
    """Captures the worker's programs; answered by `WorkerReply`."""


class Run(msgspec.Struct, tag=True):
    """Launches a step; not answered."""

    plan: StepPlan


class Collect(msgspec.Struct, tag=True):
    """Waits for the oldest step; not answered, as all ranks have the same result."""


class WorkerShutdown(msgspec.Struct, tag=True):
    """Ends the worker: it frees its device and leaves the group, as all ranks do at the same time.
    Not answered."""


class WorkerReply(msgspec.Struct, tag=True):
    """Answers a call.

    Attributes:
        measurement: The answer to `Measure`; None for other calls.
    """

    measurement: Measurement | None = None


class WorkerFailed(msgspec.Struct, tag=True):
    """Reports the error that has ended a worker."""

    failure: Failure


class WorkerConnected(msgspec.Struct, tag=True):
    """Introduces a worker that has connected from another machine.

    Attributes:
        node_rank: Number of its machine.
        index: Number of the worker on that machine.
    """

    node_rank: int
    index: int


ToWorker = Setup | Measure | Allocate | Capture | Run | Collect | WorkerShutdown
FromWorker = WorkerReply | WorkerFailed | WorkerConnected
_ENCODER = msgspec.msgpack.Encoder(enc_hook=encode_array)
_TO_WORKER = msgspec.msgpack.Decoder(ToWorker, dec_hook=decode_array)
_FROM_WORKER = msgspec.msgpack.Decoder(FromWorker, dec_hook=decode_array)


def encode(message: ToWorker | FromWorker) -> bytes:
    return _ENCODER.encode(message)


def decode_to_worker(data: bytes) -> ToWorker:
    return _TO_WORKER.decode(data)  # type: ignore[no-any-return]


def decode_from_worker(data: bytes) -> FromWorker:
    return _FROM_WORKER.decode(data)  # type: ignore[no-any-return]


# The engine's view of a rank in another process, at the other end of a pipe.

_STOP_SECONDS = 5.0


def start_process(descriptor: int) -> subprocess.Popen[bytes]:
    """Starts a worker's process. `descriptor` is the worker's end of its pipe."""
    # The kernel ends the worker with the thread that started it. So a worker is bound to its
    # starter only if that is the main thread, which lives as long as the process.
    stays = threading.current_thread() is threading.main_thread()
    owner = os.getpid() if stays else 0
    return subprocess.Popen(
        python_command("quire.engine.ranks.worker_process", str(descriptor), str(owner)),
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **thread_variables(os.environ)},
    )


class RemoteWorker:
    """A rank in another process. The process ends when its pipe is closed."""

    def __init__(self, setup: Setup, pipe: Connection) -> None:
        self.rank = setup.rank
        self._pipe = pipe
        self.send(setup)

    def fileno(self) -> int:
        """Returns the pipe's descriptor. It hangs up as soon as the process is gone."""
        return self._pipe.fileno()

    def send(self, message: ToWorker) -> None:
        self.send_bytes(encode(message))

    def send_bytes(self, message: bytes) -> None:
        """Sends an encoded message.

        Raises:
            EngineDeadError: the process has ended.
        """
        try:
            self._pipe.send_bytes(message)
        except OSError as error:
            raise self.ended() from error

    def answer(self) -> WorkerReply:
        """Waits for the answer to the oldest call.

        Raises:
            QuireError: the error that ended the worker.
        """
        try:
            message = decode_from_worker(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise self.ended() from error
        if isinstance(message, WorkerFailed):
            raise message.failure.error()
        if not isinstance(message, WorkerReply):
            raise EngineDeadError(f"the worker of rank {self.rank} does not answer")
        return message

    def ended(self) -> EngineDeadError:
        """Returns the error that reports the end of the process."""
        return EngineDeadError(f"the worker of rank {self.rank}, on another machine, has ended")

    def stop(self, *, at_once: bool = False) -> None:
        """Ends the process. Idempotent."""
        self._pipe.close()


class LocalWorker(RemoteWorker):
    """A rank in a process that this process has started."""

    def __init__(self, setup: Setup) -> None:
        pipe, theirs = Pipe()
        self.process = start_process(theirs.fileno())
        theirs.close()
        super().__init__(setup, pipe)

    def ended(self) -> EngineDeadError:
        try:
            status = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return EngineDeadError(f"the worker of rank {self.rank} does not listen any more")
        how = f"status {status}"
        if status < 0:
            how = f"killed by {signal.Signals(-status).name}"
        return EngineDeadError(f"the worker of rank {self.rank} has ended ({how})")

    def stop(self, *, at_once: bool = False) -> None:
        super().stop()
        if at_once:
            self.process.kill()
        try:
            self.process.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
