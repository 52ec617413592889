"""Files and batches as OpenAI's API shows them, and as they are kept."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from quire.errors import ConfigError
from quire.server.apis.batch.lines import BatchError
from quire.server.errors import ApiError
from quire.server.state import new_id

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
ENDED = frozenset({"failed", "completed", "expired", "cancelled"})


class FileObject(msgspec.Struct):
    """A file. Times are in seconds since 1970."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"
    expires_at: int | None = None
    status_details: None = None


class BatchErrors(msgspec.Struct):
    data: list[BatchError]
    object: str = "list"


class RequestCounts(msgspec.Struct):
    """Counts of a batch's requests, of which `completed` have an answer."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct):
    """A batch. Times are in seconds since 1970."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    object: str = "batch"
    completion_window: str = "24h"
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None

    def turn(self, status: Status, now: int) -> None:
        """Changes the status, and notes when."""
        self.status = status
        setattr(self, f"{status}_at", now)


class FileRecord(msgspec.Struct):
    """A kept file. owner: digest, in hexadecimal digits, of the API key that may see it."""

    owner: str
    file: FileObject

    @property
    def id(self) -> str:
        return self.file.id


class BatchRecord(msgspec.Struct):
    """A kept batch.

    Attributes:
        owner: as a file's.
        outputs, failures: ids of the files that its outcomes are written to, which become known
            when it ends.
        output_seconds: life of these files; None: that of all files.
    """

    owner: str
    batch: BatchObject
    outputs: str
    failures: str
    output_seconds: int | None = None

    @property
    def id(self) -> str:
        return self.batch.id

    @property
    def ended(self) -> bool:
        return self.batch.status in ENDED


# Files and batches in a folder, which outlive the server.

logger = logging.getLogger("quire.server")

MAX_RECORDS = 10_000
"""Most files, and most batches."""
_MARKER = "quire-batches"
_HARMLESS = frozenset({_MARKER, "lost+found"})
_RECORD = re.compile(r"(?:file-|batch_)[0-9a-f]{32}\.json")
_DATA = re.compile(r"(file-[0-9a-f]{32})\.jsonl|(?:file-|batch_)[0-9a-f]{32}\.json\.part")
_SWEEP_SECONDS = 60.0

Record = TypeVar("Record", FileRecord, BatchRecord)


class BatchStore:
    """Keeps files and batches, each for its owner, in a folder of its own.

    A file is `ID.jsonl` and its record `ID.json`, a batch its record. Records are written under
    another name and then renamed. At start the store
    deletes the files that have no record and that no running batch writes: they are left from
    interrupted uploads. It deletes nothing else.

    Attributes:
        max_bytes: bytes that files may take in all.
        owner_bytes: bytes that an owner's files may take, and then half of `MAX_RECORDS` is for one
            owner; None: one may have all.
        seconds: life of files, and of batches that have ended.

    Raises:
        ConfigError: the folder cannot be written to, holds other things, or is in use.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        seconds: float,
        clock: Callable[[], float] = time.time,
        *,
        owner_bytes: int | None = None,
    ) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.owner_bytes = owner_bytes
        self.seconds = seconds
        self.clock = clock
        self._files: dict[str, FileRecord] = {}
        self._batches: dict[str, BatchRecord] = {}
        self._reserved: list[tuple[str, int]] = []
        self._swept = 0.0
        try:
            self._open()
        except OSError as error:
            raise _refused(f"cannot write to {str(folder)!r} ({error.strerror})") from error

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        marker = self.folder / _MARKER
        if not marker.is_file() and (others := set(os.listdir(self.folder)) - _HARMLESS):
            raise _refused(
                f"{str(self.folder)!r} is no store of Quire's, as it holds {min(others)[:100]!r}; "
                "name an empty folder, or one that does not exist"
            )
        if not marker.is_file():
            self.folder.chmod(0o700)
        self._lock = marker.open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise _refused(f"another server uses {str(self.folder)!r}") from None
        for path in sorted(self.folder.iterdir()):
            if _RECORD.fullmatch(path.name):
                self._load(path)
        kept = {*self._files}
        for record in self._batches.values():
            kept |= {record.outputs, record.failures}
        for path in self.folder.iterdir():
            match = _DATA.fullmatch(path.name)
            if match and match[1] not in kept:
                path.unlink()

    def _load(self, path: Path) -> None:
        try:
            if path.name.startswith("file-"):
                file = msgspec.json.decode(path.read_bytes(), type=FileRecord)
                self._files[file.id] = file
            else:
                batch = msgspec.json.decode(path.read_bytes(), type=BatchRecord)
                self._batches[batch.id] = batch
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            logger.error("%s is left alone, as it cannot be read: %s", path, error)

    def close(self) -> None:
        """Lets another server use the folder."""
        self._lock.close()

    @property
    def now(self) -> int:
        return int(self.clock())

    # -- files ---------------------------------------------------------------------------------

    def data(self, id: str) -> Path:
        """Returns the path of a file's bytes."""
        return self.folder / f"{id}.jsonl"

    @property
    def used(self) -> int:
        """Bytes of all files, and of those that are coming or being written."""
        return self._used()[1]

    def _used(self, owner: str | None = None) -> tuple[int, int]:
        """Returns the number and bytes of an owner's files, or of all, with those that are coming
        and those that batches write."""
        sizes = [r.file.bytes for r in self._files.values() if owner in (None, r.owner)]
        sizes += [size for whose, size in self._reserved if owner in (None, whose)]
        for record in self._batches.values():
            if not record.ended and owner in (None, record.owner):
                for id in (record.outputs, record.failures):
                    with suppress(FileNotFoundError):
                        sizes.append(self.data(id).stat().st_size)
        return len(sizes), sum(sizes)

    def _check_room(self, owner: bytes, size: int) -> None:
        """Raises ApiError, 413, where there is no room for so many bytes more, of this owner or of
        any."""
        if self.owner_bytes is not None:
            count, used = self._used(owner.hex())
            if used + size > self.owner_bytes or count >= MAX_RECORDS // 2:
                raise ApiError(
                    413,
                    f"This key has {count} files of {used / 1e9:.3g} GB, and may have "
                    f"{MAX_RECORDS // 2} of {self.owner_bytes / 1e9:g} GB (--batch-key-gb): delete "
                    "some, or wait until they expire.",
                    code="store_full",
                )
        count, used = self._used()
        if used + size > self.max_bytes or count >= MAX_RECORDS:
            raise ApiError(
                413,
                "This server's store of files is full (--batch-dir-gb): delete some, or wait until "
                "they expire.",
                code="store_full",
            )

    @contextmanager
    def reserved(self, owner: bytes, size: int) -> Iterator[None]:
        """Keeps room for a file of at most so many bytes while it comes.

        Raises ApiError, 413, where there is none, of this owner or of any.
        """
        self._sweep()
        self._check_room(owner, size)
        self._reserved.append((owner.hex(), size))
        try:
            yield
        finally:
            self._reserved.remove((owner.hex(), size))

    def add_file(
        self, id: str, owner: bytes, filename: str, purpose: str, seconds: float | None
    ) -> FileObject:
        """Makes a file known whose bytes are there. seconds: its life; None: that of all files."""
        now = self.now
        file = FileObject(
            id,
            self.data(id).stat().st_size,
            now,
            filename[:255],
            purpose,
            expires_at=now + int(self.seconds if seconds is None else seconds),
        )
        record = FileRecord(owner.hex(), file)
        self._write(id, record)
        self._files[id] = record
        return file

    def file(self, id: str, owner: bytes, param: str = "file_id") -> FileRecord:
        """Returns a file. Raises ApiError, 404."""
        return self._found(self._files, id, owner, param, "File")

    def path(self, id: str, owner: bytes, param: str) -> Path:
        """Returns the path of a file's data. Raises ApiError, 404."""
        return self.data(self.file(id, owner, param).id)

    def files(self, owner: bytes) -> list[FileObject]:
        """Returns the owner's files, oldest first."""
        self._sweep()
        found = [r.file for r in self._files.values() if r.owner == owner.hex()]
        return sorted(found, key=lambda file: (file.created_at, file.id))

    def delete_file(self, record: FileRecord) -> None:
        """Raises ApiError, 409, for the input of a batch that has not ended."""
        if record.id in self._inputs():
            raise ApiError(409, "A batch that has not ended reads this file.", code="file_in_use")
        self._forget_file(record.id)

    def _forget_file(self, id: str) -> None:
        del self._files[id]
        self._record_path(id).unlink(missing_ok=True)
        self.data(id).unlink(missing_ok=True)

    def _inputs(self) -> set[str]:
        return {r.batch.input_file_id for r in self._batches.values() if not r.ended}

    # -- batches -------------------------------------------------------------------------------

    def save(self, record: BatchRecord) -> None:
        """Writes a batch that is new or has changed."""
        self._write(record.id, record)
        self._batches[record.id] = record

    def new_batch_id(self, owner: bytes) -> str:
        """Raises ApiError, 413, where there is no room for another batch, or for what it writes."""
        self._sweep()
        self._check_room(owner, 0)
        if len(self._batches) >= MAX_RECORDS:
            raise ApiError(413, "This server keeps no more batches.", code="store_full")
        own = sum(record.owner == owner.hex() for record in self._batches.values())
        if self.owner_bytes is not None and own >= MAX_RECORDS // 2:
            raise ApiError(413, "This server keeps no more batches of a key.", code="store_full")
        return new_id("batch", "_")

    def batch(self, id: str, owner: bytes) -> BatchRecord:
        """Returns a batch. Raises ApiError, 404."""
        return self._found(self._batches, id, owner, "batch_id", "Batch")

    def batches(self, owner: bytes) -> list[BatchRecord]:
        """Returns the owner's batches, oldest first."""
        self._sweep()
        found = [record for record in self._batches.values() if record.owner == owner.hex()]
        return sorted(found, key=lambda record: (record.batch.created_at, record.id))

    def unfinished(self) -> list[BatchRecord]:
        """Returns the batches of all owners that have not ended, oldest first."""
        found = [record for record in self._batches.values() if not record.ended]
        return sorted(found, key=lambda record: (record.batch.created_at, record.id))

    # -- records -------------------------------------------------------------------------------

    def _found(
        self, records: Mapping[str, Record], id: str, owner: bytes, param: str, what: str
    ) -> Record:
        self._sweep()
        record = records.get(id)
        if record is None or record.owner != owner.hex():
            raise ApiError(
                404,
                f"{what} with id '{id[:200]}' not found (see '{param}').",
                param=param,
                code=f"{what.lower()}_not_found",
            )
        return record

    def _record_path(self, id: str) -> Path:
        return self.folder / f"{id}.json"

    def _write(self, id: str, record: FileRecord | BatchRecord) -> None:
        path = self._record_path(id)
        part = path.with_name(f"{path.name}.part")
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(record))
        part.replace(path)

    def _sweep(self) -> None:
        """Forgets what has expired. Looks once a minute."""
        now = self.clock()
        if now - self._swept < _SWEEP_SECONDS:
            return
        self._swept = now
        inputs = self._inputs()
        for file in [r.file for r in self._files.values()]:
            if file.expires_at is not None and file.expires_at <= now and file.id not in inputs:
                self._forget_file(file.id)
        for record in list(self._batches.values()):
            if record.ended and record.batch.created_at + self.seconds <= now:
                del self._batches[record.id]
                self._record_path(record.id).unlink(missing_ok=True)


def _refused(why: str) -> ConfigError:
    return ConfigError(f"batch_dir: {why}", "batch_dir")
