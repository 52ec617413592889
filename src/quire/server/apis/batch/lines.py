"""Lines of batch input and output files."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec

from quire.errors import ConfigError
from quire.server.state import new_id
from quire.system import open_regular

ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/score",
    "/v1/rerank",
)
MAX_ID = 512

_AROUND = 8192
"""Bytes allowed for a line besides its body."""


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the input."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class BatchResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct, omit_defaults=True):
    """The reason why a line was not run.

    line: its number, from 1, where its custom id is missing or not unique.
    """

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchOutcome(msgspec.Struct):
    """One line of the output."""

    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: BatchError | None

    @property
    def failed(self) -> bool:
        return self.response is None or self.response.status_code != 200


OutcomeKey = str | int
"""Identifies an outcome: the custom id, or the line's number where the id is missing or not unique.
"""


@dataclass(slots=True)
class BatchLine:
    """A line of the input: a request, or the error that it holds."""

    number: int
    custom_id: str | None
    request: BatchRequest | None = None
    error: BatchError | None = None

    @property
    def key(self) -> OutcomeKey:
        if self.custom_id is None or (self.error is not None and self.error.line is not None):
            return self.number
        return self.custom_id


def refused(line: BatchLine) -> BatchOutcome:
    return BatchOutcome(new_id("batch_req", "_"), line.custom_id, None, line.error)


def read_lines(path: Path, max_body: int) -> Iterator[BatchLine]:
    """Yields the requests of a file; empty lines are skipped.

    Args:
        max_body: most bytes of a request's body.

    Raises:
        ConfigError: the file cannot be read.
    """
    seen: set[str] = set()
    try:
        with open_regular(path) as file:
            for number, data in _bounded(file, max_body + _AROUND):
                yield _parse(number, data, seen)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", "input") from None


def _bounded(file: BinaryIO, limit: int) -> Iterator[tuple[int, bytes | None]]:
    """Yields (number, line) for each line that is not empty; None stands for one that is too
    long."""
    number = 0
    while data := file.readline(limit):
        number += 1
        if len(data) == limit and not data.endswith(b"\n"):
            while rest := file.readline(limit):
                if rest.endswith(b"\n"):
                    break
            yield number, None
        elif data.strip():
            yield number, data


def _parse(number: int, data: bytes | None, seen: set[str]) -> BatchLine:
    if data is None:
        return _bad(number, "line_too_long", "it is longer than a request may be.")
    try:
        request = msgspec.json.decode(data, type=BatchRequest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        what = "invalid_request" if isinstance(error, msgspec.ValidationError) else "invalid_json"
        return _bad(number, f"{what}_line", f"it is no batch request: {error}.")
    custom_id = request.custom_id
    if not 0 < len(custom_id) <= MAX_ID:
        why = f"'custom_id' must have 1 to {MAX_ID} characters."
        return _bad(number, "invalid_custom_id", why, "custom_id")
    if custom_id in seen:
        why = f"the custom_id {custom_id[:100]!r} was in an earlier line."
        return _bad(number, "duplicate_custom_id", why, "custom_id", custom_id)
    seen.add(custom_id)
    line = BatchLine(number, custom_id, request)
    if request.method != "POST":
        line.error = BatchError(
            "invalid_method", f"'method' must be POST, not {request.method[:40]!r}.", "method"
        )
    elif request.url not in ROUTES:
        line.error = BatchError(
            "invalid_url",
            f"'url' must be one of {', '.join(ROUTES)}, not {request.url[:100]!r}.",
            "url",
        )
    else:
        line.error = _check_body(request.body)
    return line


def _bad(
    number: int, code: str, why: str, param: str | None = None, custom_id: str | None = None
) -> BatchLine:
    return BatchLine(
        number, custom_id, error=BatchError(code, f"Line {number}: {why}", param, number)
    )


class _Peek(msgspec.Struct):
    """Fields that have no meaning in a batch."""

    stream: bool | None = None
    background: bool | None = None


def _check_body(body: msgspec.Raw) -> BatchError | None:
    try:
        peek = msgspec.json.decode(body, type=_Peek)
    except msgspec.ValidationError as error:
        return BatchError("invalid_body", f"'body': {error}.", "body")
    for name in ("stream", "background"):
        if getattr(peek, name):
            return BatchError(
                "unsupported_parameter", f"'{name}' is not available in batches.", f"body.{name}"
            )
    return None


# Output files of a batch, which also record the lines that are done.


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
