"""Chrome's trace events in files of bounded size, which Perfetto opens even without their end."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from quire.errors import ConfigError

logger = logging.getLogger("quire.engine")

Event = dict[str, Any]

FILE_BYTES = 32_000_000
MOST_FILES = 8
_PATTERN = "quire-*.trace.json"
_FLUSH_BYTES = 256_000
_FLUSH_SECONDS = 1.0


class TraceFiles:
    """A JSON array per file, an event per line. Only whole lines are written, so that what a crash
    leaves lacks no more than the last second and the closing bracket.

    The oldest files are removed, those of earlier runs too.
    """

    def __init__(
        self, folder: Path, file_bytes: int = FILE_BYTES, most_files: int = MOST_FILES
    ) -> None:
        """Raises ConfigError where `folder` cannot be written to."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            writable = os.access(folder, os.W_OK | os.X_OK)
        except OSError as error:
            raise ConfigError(f"trace_dir {str(folder)!r}: {error.strerror}", "trace_dir") from None
        if not writable:
            raise ConfigError(f"trace_dir {str(folder)!r} cannot be written to", "trace_dir")
        self.begin: Callable[[], Iterable[Event]] = tuple
        """Gives the events that each file begins with: the names of its tracks."""
        self._folder = folder
        self._file_bytes = file_bytes
        self._most_files = most_files
        self._stem = f"quire-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self._fd: int | None = None
        self._count = 0
        self._size = 0
        self._lines: list[bytes] = []
        self._waiting = 0
        self._flushed = time.monotonic()
        self._failed = False

    def write(self, event: Event) -> None:
        if self._failed:
            return
        if self._fd is None:
            self._open()
        self._add(msgspec.json.encode(event) + b",\n")
        if self._size > self._file_bytes:
            self.close()
        elif self._waiting > _FLUSH_BYTES or time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def _add(self, line: bytes) -> None:
        self._lines.append(line)
        self._waiting += len(line)
        self._size += len(line)

    def _open(self) -> None:
        path = self._folder / f"{self._stem}-{self._count:05d}.trace.json"
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        except OSError as error:
            self._give_up(error)
            return
        self._count += 1
        self._size = 0
        self._add(b"[\n")
        for event in self.begin():
            self._add(msgspec.json.encode(event) + b",\n")
        self._prune()

    def _prune(self) -> None:
        files = sorted(self._folder.glob(_PATTERN), key=lambda path: (_age(path), path.name))
        for path in files[: -self._most_files]:
            with contextlib.suppress(OSError):  # gone already, or another user's
                path.unlink()

    def flush(self) -> None:
        """Writes all events so far to the file."""
        self._flushed = time.monotonic()
        if self._fd is None or not self._lines:
            return
        data = memoryview(b"".join(self._lines))
        self._lines.clear()
        self._waiting = 0
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """A full disk must not stop the engine."""
        logger.warning("no more traces are written: %s", error)
        self._failed = True
        self._lines.clear()
        self._release()

    def _release(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):  # of a network's full disk: the next file tells
                os.close(self._fd)
            self._fd = None

    def close(self) -> None:
        """Completes the file; the next event begins another. Idempotent."""
        if self._fd is not None:
            self._lines.append(b'{"name":"end of file","ph":"M","pid":0,"args":{}}\n]\n')
            self.flush()
            self._release()


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process removes old files too
        return 0.0
