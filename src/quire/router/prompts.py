"""Reads the bodies of requests to a router, and finds the prompt in them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec

from quire.engine.process.placement import PIECE
from quire.server.context.body_budget import HeldBody
from quire.server.errors import ApiError
from quire.server.http import bodies


async def read_body(
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]], limit: int, held: HeldBody
) -> bytearray | None:
    """Reads a body, with the same time limits as on a server.

    Args:
        limit: most bytes of the body.
        held: buffer for the bytes that have arrived.

    Returns:
        The body; None if the client disconnects before it is complete.

    Raises:
        ApiError: 408 for a late body, 413 for one above `limit`, 503 for a full `BodyBudget`.
    """
    began, size = asyncio.get_running_loop().time(), 0
    try:
        async with asyncio.timeout(bodies.BODY_SECONDS) as timeout:
            held.timeout = timeout
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > limit:
                    raise ApiError(
                        413, f"The body has more than {limit} bytes.", code="body_too_large"
                    )
                held.take(chunk)
                if not message.get("more_body", False):
                    return held.finish()
                more = bodies.BODY_SECONDS + size / bodies.BODY_BYTES_PER_SECOND
                timeout.reschedule(began + more)
    except TimeoutError:
        raise held.late_error() from None


# Keys of prompts. By them the router finds replicas that hold the KV of a prompt's beginning.

BYTES_PER_TOKEN = 4
PIECE_BYTES = PIECE * BYTES_PER_TOKEN
_MOST_PIECES = 1024
"""Most pieces of a prompt that get keys; two prompts rarely differ only after that many."""


class _PromptFields(msgspec.Struct):
    """The fields of a body that make up the prompt, in the order of most templates."""

    model: msgspec.Raw = msgspec.Raw(b"")
    cache_salt: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    previous_response_id: msgspec.Raw = msgspec.Raw(b"")


_DECODER = msgspec.json.Decoder(_PromptFields)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's prompt as the router knows it.

    Attributes:
        keys: one key for each whole piece. Prompts with the same first n keys begin alike.
        size: number of bytes.
        continues: whether the request continues a stored answer, which only one replica may have.
    """

    keys: tuple[bytes, ...] = ()
    size: int = 0
    continues: bool = False


def read_prompt(body: bytes | bytearray) -> Prompt:
    """Returns the prompt in a request's body; an empty one if the body is not a JSON object."""
    try:
        found = _DECODER.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return Prompt()
    parts = (
        found.tools, found.system, found.instructions, found.messages, found.prompt, found.input,
    )  # fmt: skip
    text = b"".join(bytes(part) for part in parts)
    root = hashlib.blake2b(bytes(found.model) + b"\0" + bytes(found.cache_salt), digest_size=16)
    whole = min(len(text) // PIECE_BYTES, _MOST_PIECES)
    pieces = (text[at * PIECE_BYTES : (at + 1) * PIECE_BYTES] for at in range(whole))
    keys = accumulate(pieces, _next_key, initial=root.digest())
    continues = bytes(found.previous_response_id) not in (b"", b"null")
    return Prompt(tuple(keys)[1:], len(text), continues)


def _next_key(before: bytes, piece: bytes) -> bytes:
    return hashlib.blake2b(before + piece, digest_size=16).digest()
