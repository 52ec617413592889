"""Files and batches as OpenAI's API shows them, and as they are kept."""

from __future__ import annotations

from typing import Literal

import msgspec

from quire.server.batch.lines import BatchError

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
