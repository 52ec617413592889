"""Reads request bodies, and checks their time, size, content type, JSON and fields."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
from collections.abc import AsyncIterator
from typing import TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from quire.server.context.body_budget import HeldBody, late_body_error
from quire.server.context.request_context import context_of
from quire.server.errors import ApiError, from_validation
from quire.server.http.strict_model import StrictModel
from quire.server.state import state_of

MAX_MEMBERS = 50_000
MAX_STRINGS = 250_000
MAX_VALUES = 1_000_000

_SLICE = 64 * 1024


def check_json_size(data: bytes | bytearray) -> None:
    """Refuses a JSON text whose decoding would hold the interpreter's lock for too long.

    Decoder and validator hold the lock until they end. Their time grows with the number of values,
    so the values are counted first, without decoding them. The text is read in slices, and other
    threads may run between two slices. Counts after invalid JSON may be wrong, which does not
    matter because the decoder stops there.

    Raises:
        ApiError: 413, the text has more than `MAX_MEMBERS` lists, objects and members of objects,
            more than `MAX_STRINGS` strings, or more than `MAX_VALUES` values.
    """
    members = quotes = values = 0
    in_string, escape = False, b""
    for start in range(0, len(data), _SLICE):
        part = escape + data[start : start + _SLICE]
        escape = b"\\" if (len(part) - len(part.rstrip(b"\\"))) % 2 else b""
        part = part[: len(part) - len(escape)]
        pieces = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(pieces[in_string::2])
        in_string ^= len(pieces) % 2 == 0
        members += sum(map(outside.count, (b"[", b"{", b":")))
        quotes += len(pieces) - 1
        values += outside.count(b",")
        for count, most, what in (
            (members, MAX_MEMBERS, "lists, objects and members"),
            ((quotes + 1) // 2, MAX_STRINGS, "strings"),
            (values, MAX_VALUES, "values"),
        ):
            if count > most:
                raise ApiError(413, f"The body has more than {most} {what}.", code="body_too_large")


BODY_SECONDS = 30.0
BODY_BYTES_PER_SECOND = 10_000
"""A body must arrive in `BODY_SECONDS`, plus one second for each `BODY_BYTES_PER_SECOND` bytes."""

_OFF_LOOP_BYTES = 64 * 1024

Model = TypeVar("Model", bound=BaseModel)


async def read_any_body(request: Request, model: type[Model], limit: int) -> Model:
    """Reads a JSON body of any content type.

    Ollama's clients, such as curl in its documentation, send JSON with the type of a form. Browsers
    send the header `Origin` with requests to other sites. Such requests need JSON's own type.

    Raises:
        ApiError: as `read_body`.
    """
    if "origin" in request.headers:
        return await read_body(request, model, limit)
    return await _read(request, model, limit)


async def read_body(request: Request, model: type[Model], limit: int) -> Model:
    """Reads and validates a body. Large bodies are parsed in a thread, one at a time.

    Args:
        model: the pydantic model of the body.
        limit: most bytes of the body.

    Raises:
        ApiError: 408, 413, 415 or 503; 400 with the name of an invalid field.
    """
    # Only JSON is accepted. Other sites' pages can make a browser send forms and plain text without
    # a CORS check, but not JSON.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, "The body must be JSON, sent with the header 'Content-Type: application/json'."
        )
    return await _read(request, model, limit)


async def _read(request: Request, model: type[Model], limit: int) -> Model:
    state = state_of(request)
    with state.bodies.hold() as held:
        async with body_time(request, held) as timeout:
            async for chunk in body_chunks(request, limit, timeout):
                held.take(chunk)
        data = held.finish()
        if len(data) <= _OFF_LOOP_BYTES:
            body = parse(data, model)
        else:
            loop, thread = asyncio.get_running_loop(), state.parse_thread
            run = contextvars.copy_context().run  # The context has the request's hints.
            body = await loop.run_in_executor(thread, run, _parse_large, data, model)
    if isinstance(body, StrictModel):
        for key, field in body.feature_fields.items():
            if (value := getattr(body, key)) is not None:
                context_of(request).fields[field] = value
    return body


@contextlib.asynccontextmanager
async def body_time(
    request: Request, held: HeldBody | None = None
) -> AsyncIterator[asyncio.Timeout]:
    """Bounds the time in which a body must arrive. `body_chunks` extends it.

    Raises:
        ApiError: 408 after that time; 503 if the body was dropped to make room for others.
    """
    remaining = context_of(request).remaining
    try:
        async with asyncio.timeout(remaining), asyncio.timeout(BODY_SECONDS) as timeout:
            if held is not None:
                held.timeout = timeout
            yield timeout
    except TimeoutError:
        raise (late_body_error() if held is None else held.late_error()) from None


async def body_chunks(
    request: Request, limit: int, timeout: asyncio.Timeout
) -> AsyncIterator[bytes]:
    """Yields a body as it arrives. Each chunk extends `timeout`.

    Raises:
        ApiError: 413 above `limit` bytes; 400 if the client disconnects.
    """
    too_large = ApiError(413, f"The body is larger than {limit} bytes.", code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:18]) > limit:
        raise too_large
    size, began = 0, asyncio.get_running_loop().time()
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise too_large
            timeout.reschedule(began + BODY_SECONDS + size / BODY_BYTES_PER_SECOND)
            yield chunk
    except ClientDisconnect:
        raise ApiError(400, "The client left before its request was read.") from None


def _parse_large(data: bytearray, model: type[Model]) -> Model:
    check_json_size(data)
    # Parsing makes many objects, but no garbage. The garbage collector would walk them again and
    # again, which doubles the time for which the interpreter's lock is held.
    gc.disable()
    try:
        return parse(data, model)
    finally:
        gc.enable()


def parse(data: bytes | bytearray, model: type[Model]) -> Model:
    """Parses and validates a body.

    msgspec accepts standard JSON only: no NaN, no infinities, no lone surrogates.

    Raises:
        ApiError: 400.
    """
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"The body is not valid JSON: {reason}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise from_validation(error) from None
