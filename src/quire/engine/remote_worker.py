"""A further rank, as the engine sees it: a process at the other end of a pipe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing.connection import Pipe

from quire.engine.threads import thread_variables
from quire.engine.worker_messages import Broken, Done, Setup, ToWorker, decode_from_worker, encode
from quire.errors import EngineDeadError

_STOP_SECONDS = 5.0


class RemoteWorker:
    """A rank in a process of its own, which ends when its pipe does."""

    def __init__(self, setup: Setup) -> None:
        self.rank = setup.rank
        self._pipe, theirs = Pipe()
        command = [sys.executable, "-m", "quire.engine.worker_process", str(theirs.fileno())]
        self.process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **thread_variables(os.environ)},
        )
        theirs.close()
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
        return message

    def ended(self) -> EngineDeadError:
        """Returns the error that tells of the process's end."""
        try:
            status = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return EngineDeadError(f"the worker of rank {self.rank} does not listen any more")
        how = f"status {status}"
        if status < 0:
            how = f"killed by {signal.Signals(-status).name}"
        return EngineDeadError(f"the worker of rank {self.rank} has ended ({how})")

    def stop(self, *, at_once: bool = False) -> None:
        """Ends the process. Idempotent."""
        self._pipe.close()
        if at_once:
            self.process.kill()
        try:
            self.process.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
