"""`/v1/batches`: files of requests, answered in the background."""

from __future__ import annotations

from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from quire.server.apis.batch.files import Seconds, batches_of
from quire.server.apis.batch.lines import ROUTES
from quire.server.apis.batch.store import BatchObject, BatchRecord
from quire.server.context.request_context import owner_of
from quire.server.errors import ApiError
from quire.server.http.bodies import read_body
from quire.server.http.query import Page, Query, page_of
from quire.server.http.sse import json_response
from quire.server.http.strict_model import Metadata, Name, StrictModel
from quire.server.state import state_of


class ExpiresAfter(StrictModel):
    anchor: Literal["created_at"]
    seconds: Seconds


class CreateBatchRequest(StrictModel):
    """Body of `POST /v1/batches`."""

    input_file_id: Name
    endpoint: Name
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchList(Page[BatchObject]):
    pass


async def create_batch(request: Request) -> Response:
    service, state = batches_of(request), state_of(request)
    body = await read_body(request, CreateBatchRequest, state.args.max_body_bytes)
    if body.endpoint not in ROUTES:
        raise ApiError(
            400,
            f"Invalid value for 'endpoint': it must be one of {', '.join(ROUTES)}.",
            param="endpoint",
            code="invalid_value",
        )
    owner = owner_of(request)
    file = service.store.file(body.input_file_id, owner, "input_file_id")
    if file.file.purpose != "batch":
        raise ApiError(
            400,
            "'input_file_id' must be a file that was uploaded with the purpose 'batch'.",
            param="input_file_id",
            code="invalid_value",
        )
    expires = body.output_expires_after
    seconds = None if expires is None else expires.seconds
    return json_response(service.create(owner, file, body.endpoint, body.metadata, seconds))


async def list_batches(request: Request) -> Response:
    query = Query(request, "after", "limit")
    found = [r.batch for r in batches_of(request).store.batches(owner_of(request))]
    page = page_of(query, found, [batch.id for batch in found], order=("desc", "asc"))
    return json_response(page)


async def show_batch(request: Request) -> Response:
    return json_response(_batch(request).batch)


async def cancel_batch(request: Request) -> Response:
    record = _batch(request)
    batches_of(request).cancel(record)
    return json_response(record.batch)


def _batch(request: Request) -> BatchRecord:
    store = batches_of(request).store
    return store.batch(request.path_params["batch_id"], owner_of(request))
