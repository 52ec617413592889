"""The routes of files, and of batches of requests in files."""

from __future__ import annotations

from quire.server.apis.batch.batches import (
    BatchList,
    CreateBatchRequest,
    cancel_batch,
    create_batch,
    list_batches,
    show_batch,
)
from quire.server.apis.batch.files import (
    MAX_LISTED,
    DeletedFile,
    FileList,
    UploadRequest,
    delete_file,
    file_content,
    list_files,
    show_file,
    upload_file,
)
from quire.server.apis.batch.store import BatchObject, FileObject
from quire.server.apis.route import PAGE_QUERY, Route

_FILE = "/v1/files/{file_id}"
_BATCH = "/v1/batches/{batch_id}"
_FILE_LIMIT = {"type": "integer", "minimum": 1, "maximum": MAX_LISTED}

ROUTES = (
    Route("post", "/v1/files", upload_file, "Upload the input of a batch",
          UploadRequest, FileObject, media="multipart/form-data", counted=True, queued=False),
    Route("get", "/v1/files", list_files, "Files", answer=FileList,
          query={**PAGE_QUERY, "purpose": {"type": "string"}, "limit": _FILE_LIMIT}),
    Route("get", _FILE, show_file, "A file's name and size", answer=FileObject),
    Route("delete", _FILE, delete_file, "Delete a file", answer=DeletedFile),
    Route("get", f"{_FILE}/content", file_content, "A file's bytes",
          answer="application/octet-stream"),
    Route("post", "/v1/batches", create_batch, "Answer a file of requests",
          CreateBatchRequest, BatchObject, counted=True, queued=False),
    Route("get", "/v1/batches", list_batches, "Batches", answer=BatchList,
          query={name: PAGE_QUERY[name] for name in ("after", "limit")}),
    Route("get", _BATCH, show_batch, "A batch as it stands", answer=BatchObject),
    Route("post", f"{_BATCH}/cancel", cancel_batch, "End a batch", answer=BatchObject),
)  # fmt: skip
