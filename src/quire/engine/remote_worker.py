"""A further rank, as the engine sees it: a process at the other end of a pipe."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from multiprocessing.connection import Connection, Pipe

from quire.child_process import python_command
from quire.engine.threads import thread_variables
from quire.engine.worker_messages import Broken, Done, Setup, ToWorker, decode_from_worker, encode
from quire.errors import EngineDeadError

_STOP_SECONDS = 5.0


def start_process(descriptor: int) -> subprocess.Popen[bytes]:
    """Starts a worker's process, whose end of its pipe has this descriptor."""
    # A worker may be bound to the life of the thread that starts it only where that thread stays.
    stays = threading.current_thread() is threading.main_thread()
    owner = os.getpid() if stays else 0
    return subprocess.Popen(
        python_command("quire.engine.worker_process", str(descriptor), str(owner)),
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **thread_variables(os.environ)},
    )


class RemoteWorker:
    """A rank in another process, which ends when its pipe does."""

    def __init__(self, setup: Setup, pipe: Connection) -> None:
        self.rank = setup.rank
        self._pipe = pipe
        self.send(setup)

    def fileno(self) -> int:
        """Returns the pipe's descriptor, which hangs up as soon as the process is gone."""
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

    def answer(self) -> Done:
        """Waits for the answer to the oldest call.

        Raises:
            QuireError: what ended the worker.
        """
        try:
            message = decode_from_worker(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise self.ended() from error
        if isinstance(message, Broken):
            raise message.failure.error()
        if not isinstance(message, Done):
            raise EngineDeadError(f"the worker of rank {self.rank} does not answer")
        return message

    def ended(self) -> EngineDeadError:
        """Returns the error that tells of the process's end."""
        return EngineDeadError(f"the worker of rank {self.rank}, on another machine, has ended")

    def stop(self, *, at_once: bool = False) -> None:
        """Ends the process. Idempotent."""
        self._pipe.close()


class LocalWorker(RemoteWorker):
    """A rank in a process that was started here."""

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
