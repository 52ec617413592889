"""The bodies of requests to a router."""

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
    """Returns a body, which has as long to come as on a server; None if the client leaves before it
    is whole.

    Args:
        held: keeps what has come.

    Raises:
        ApiError: 408; 413, it has more than `limit` bytes; 503, see `BodyBudget`.
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
                    return held.whole()
                more = bodies.BODY_SECONDS + size / bodies.BODY_BYTES_PER_SECOND
                timeout.reschedule(began + more)
    except TimeoutError:
        raise held.late() from None


# Keys of the prompts of requests, by which replicas are told apart that hold their beginnings.

BYTES_PER_TOKEN = 4
PIECE_BYTES = PIECE * BYTES_PER_TOKEN
_MOST_PIECES = 1024
"""Pieces that are looked at: what is behind them is hardly shared in part."""


class _Body(msgspec.Struct):
    """The parts of a body that stand before an answer, in the order of most templates."""

    model: msgspec.Raw = msgspec.Raw(b"")
    cache_salt: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    previous_response_id: msgspec.Raw = msgspec.Raw(b"")


_DECODER = msgspec.json.Decoder(_Body)


@dataclass(frozen=True, slots=True)
class Prompt:
    """keys: of the whole pieces, by which equal beginnings are found. size: in bytes.
    continues: whether it goes on after an answer that only one replica may have stored."""

    keys: tuple[bytes, ...] = ()
    size: int = 0
    continues: bool = False


def read_prompt(body: bytes | bytearray) -> Prompt:
    """Returns the prompt of a request's body; of what is no JSON object, an empty one."""
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
