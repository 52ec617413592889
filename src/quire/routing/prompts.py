"""Keys of the prompts of requests, by which replicas are told apart that hold their beginnings.

A key stands for the bytes of a prompt up to the end of a piece. Prompts are compared as clients
send them, before any template: two that begin alike there also begin alike in tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import accumulate

import msgspec

from quire.engine.process.placement import PIECE

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
