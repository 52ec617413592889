"""Starts the engine's process, watches it, and starts it again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from quire.engine.processes import PREFIX, remove_stale, take_ownership, thread_variables
from quire.errors import ConfigError
from quire.system import python_command

logger = logging.getLogger("quire.engine")

_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0
_HEALTHY = 60.0
"""Seconds of life after which earlier deaths no longer count."""
_STOP_SECONDS = 5.0
_MOST_PATH_BYTES = 107
"""Bytes that a Unix socket's path may have."""
_OWN_PATH_BYTES = 32
"""Bytes reserved in the path for the names of the folder and the socket."""


class EngineHost:
    """Owns the engine's process, and the private folder of its socket. Belongs to an event loop.

    Args:
        restarts: most restarts in a row. Pauses between them double. After an engine has lived
            for a minute, the count begins anew.
        environment: variables for the process, besides this one's.
    """

    def __init__(self, restarts: int, environment: Mapping[str, str] | None = None) -> None:
        remove_stale()
        self.folder = _private_folder()
        self._lock = take_ownership(self.folder)
        self.address = str(self.folder / "engine")
        self._environment = dict(environment or {})
        self.deaths = 0
        self._left = self._restarts = restarts
        self._on_death: Callable[[int], None] = lambda status: None
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.TimerHandle | None = None
        self._closing = False
        self._resting = False
        self._exited = asyncio.Event()

    def start(self, on_death: Callable[[int], None]) -> None:
        """Starts the process.

        Args:
            on_death: called on the loop, with the exit status, each time the process has died.
        """
        self._on_death = on_death
        self._launch()

    def _launch(self) -> None:
        self._exited.clear()
        self._began = time.monotonic()
        self.process = subprocess.Popen(
            python_command("quire.engine.process.process", self.address, str(os.getpid())),
            stdin=subprocess.DEVNULL,
            env={**os.environ, **thread_variables(os.environ), **self._environment},
            process_group=0,  # A terminal's Ctrl-C must reach only the client.
        )
        threading.Thread(
            target=self._wait, args=(self.process,), daemon=True, name="engine-watch"
        ).start()

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        with contextlib.suppress(RuntimeError):  # The event loop may be closed already.
            self._loop.call_soon_threadsafe(self._died, status)

    def _died(self, status: int) -> None:
        self._exited.set()
        if self._closing or self._resting:
            return
        self.deaths += 1
        if time.monotonic() - self._began > _HEALTHY:
            self._left = self._restarts
        if self._left:
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (self._restarts - self._left))
            self._left -= 1
            logger.error("the engine ended (%s); starting it again in %g s", _how(status), pause)
            self._again = self._loop.call_later(pause, self._launch)
        else:
            logger.error("the engine ended (%s)", _how(status))
        self._on_death(status)

    async def stop(self, ask: Callable[[], None]) -> None:
        """Asks the process to end, kills it if it does not, and removes the folder. Idempotent."""
        if self._closing:
            return
        self._closing = True
        await self._end(ask)
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()
        remove_stale()  # A killed engine leaves its own folder.

    async def rest(self, ask: Callable[[], None]) -> None:
        """Ends the process as `stop` does, and waits until it is gone. `wake` starts another."""
        self._resting = True
        await self._end(ask)
        await self._exited.wait()

    def wake(self) -> None:
        self._resting = False
        self._launch()

    async def _end(self, ask: Callable[[], None]) -> None:
        if self._again is not None:
            self._again.cancel()
        if self.process.poll() is None:
            ask()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exited.wait(), _STOP_SECONDS)
            if self.process.poll() is None:
                self.process.kill()


def _private_folder() -> Path:
    """Makes a folder that only its owner can read, with a path short enough for a socket in it.

    Raises:
        ConfigError: no such folder can be made.
    """
    for parent in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        if len(os.fsencode(parent)) > _MOST_PATH_BYTES - _OWN_PATH_BYTES:
            continue
        with contextlib.suppress(OSError):
            return Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    raise ConfigError(
        f"no folder for the engine's socket: {tempfile.gettempdir()!r} cannot be written to or is "
        "too long for a Unix socket; set TMPDIR to a short path"
    )


def _how(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-status).name}"
    return f"status {status}"
