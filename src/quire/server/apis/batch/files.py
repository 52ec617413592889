"""`/v1/files`: the input of batches and what came of them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, ValidationError, WithJsonSchema
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from quire.server.apis.batch.form import FormReader, boundary_of
from quire.server.apis.batch.service import BatchService
from quire.server.apis.batch.store import BatchStore, FileObject, FileRecord
from quire.server.context.request_context import owner_of
from quire.server.errors import ApiError, from_validation
from quire.server.http.bodies import body_chunks, body_time
from quire.server.http.query import PAGING, Page, Query, page_of
from quire.server.http.sse import json_response
from quire.server.http.strict_model import StrictModel
from quire.server.state import new_id, state_of

MAX_LISTED = 10_000

Seconds = Annotated[int, Field(ge=3600, le=2_592_000)]


class UploadRequest(StrictModel):
    """Fields of an upload, a form. `file` is read apart, as it comes."""

    file: Annotated[Any, WithJsonSchema({"type": "string", "format": "binary"})]
    purpose: Literal["batch", "vision", "user_data"]
    anchor: Literal["created_at"] | None = Field(None, alias="expires_after[anchor]")
    seconds: Seconds | None = Field(None, alias="expires_after[seconds]")


class FileList(Page[FileObject]):
    pass


class DeletedFile(msgspec.Struct):
    id: str
    object: str = "file"
    deleted: bool = True


def batches_of(request: Request) -> BatchService:
    """Returns the server's batches. Raises ApiError, 404, where it keeps none."""
    service: BatchService | None = request.app.state.batches
    if service is None:
        raise ApiError(
            404,
            "This server keeps no files and runs no batches (see --batch-dir).",
            code="no_batch_dir",
        )
    return service


async def upload_file(request: Request) -> Response:
    service, args = batches_of(request), state_of(request).args
    boundary = boundary_of(request.headers.get("content-type", ""))
    limit = round(args.batch_file_mb * 1e6)
    length = request.headers.get("content-length", "")
    size = min(int(length[:18]), limit) if length.isdecimal() else limit
    with service.store.reserved(owner_of(request), size):
        return json_response(await _upload(request, service.store, boundary, limit))


async def _upload(request: Request, store: BatchStore, boundary: bytes, limit: int) -> FileObject:
    id = new_id("file")
    path = store.data(id)
    try:
        with path.open("xb") as target:
            reader = FormReader(boundary, target, "file")
            async with body_time(request) as timeout:
                async for chunk in body_chunks(request, limit, timeout):
                    await asyncio.to_thread(reader.feed, chunk)
            reader.close()
        if reader.size == 0:
            raise ApiError(400, "'file' is empty.", param="file", code="invalid_value")
        fields = _fields(reader)
        return store.add_file(
            id, owner_of(request), reader.filename or "file", fields.purpose, fields.seconds
        )
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _fields(reader: FormReader) -> UploadRequest:
    values: dict[str, Any] = {"file": None, **reader.fields}
    seconds = values.get("expires_after[seconds]")
    if seconds is not None and seconds.isascii() and seconds.isdecimal() and len(seconds) < 10:
        values["expires_after[seconds]"] = int(seconds)
    try:
        fields = UploadRequest.model_validate(values)
    except ValidationError as error:
        raise from_validation(error) from None
    if (fields.anchor is None) != (fields.seconds is None):
        raise ApiError(
            400,
            "'expires_after' needs both an anchor and seconds.",
            param="expires_after",
            code="invalid_value",
        )
    return fields


async def list_files(request: Request) -> Response:
    query = Query(request, *PAGING, "purpose")
    purpose = query.text("purpose")
    found = [
        file
        for file in batches_of(request).store.files(owner_of(request))
        if purpose in (None, file.purpose)
    ]
    page = page_of(
        query,
        found,
        [file.id for file in found],
        order=("desc", "asc"),
        limit=MAX_LISTED,
        most=MAX_LISTED,
    )
    return json_response(page)


async def show_file(request: Request) -> Response:
    return json_response(_file(request).file)


async def file_content(request: Request) -> Response:
    record = _file(request)
    path = batches_of(request).store.data(record.id)
    return FileResponse(path, media_type="application/octet-stream")


async def delete_file(request: Request) -> Response:
    record = _file(request)
    batches_of(request).store.delete_file(record)
    return json_response(DeletedFile(record.id))


def _file(request: Request) -> FileRecord:
    store = batches_of(request).store
    return store.file(request.path_params["file_id"], owner_of(request))
