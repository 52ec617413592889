"""Output files of a batch, which also record the lines that are done."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

import msgspec

from quire.errors import ConfigError
from quire.server.batch.lines import BatchOutcome, OutcomeKey


class OutcomeFile:
    """Appends outcomes, each with one write.

    A kill leaves at most one torn line at the end, which opening the file again cuts off.

    Attributes:
        done: keys of the outcomes that the file held when it was opened.
        failed: number of failures among them.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file cannot be written, is in use, or is not a batch's."""
        self.path = path
        self.done: set[OutcomeKey] = set()
        self.failed = 0
        try:
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}", "output") from None
        try:
            self._lock()
            self._recover()
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"another run is writing {self.path}", "output") from None

    def _recover(self) -> None:
        end = 0
        with self.path.open("rb") as reader:
            for number, data in enumerate(reader, 1):
                if not data.endswith(b"\n"):
                    break
                try:
                    outcome = msgspec.json.decode(data, type=BatchOutcome)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    raise ConfigError(
                        f"line {number} of {self.path} is no outcome of a batch: is it another "
                        "file?",
                        "output",
                    ) from None
                self.done.add(_key(outcome))
                self.failed += outcome.failed
                end += len(data)
        os.truncate(self._file.fileno(), end)

    def write(self, outcome: BatchOutcome) -> None:
        self._file.write(msgspec.json.encode(outcome) + b"\n")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> OutcomeFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _key(outcome: BatchOutcome) -> OutcomeKey:
    if outcome.error is not None and outcome.error.line is not None:
        return outcome.error.line
    return outcome.custom_id or ""
