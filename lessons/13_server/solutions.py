"""Solutions of the exercises on serving."""

from __future__ import annotations

import asyncio
import codecs
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from typing import Any


def events(chunks: Sequence[bytes]) -> Iterator[Any]:
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.strip() == b"data: [DONE]":
                return
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))


async def at_most(
    slots: asyncio.Semaphore, work: Awaitable[Any], timeout: float
) -> tuple[int, Any]:
    if slots.locked():
        if inspect.iscoroutine(work):
            work.close()
        return 503, None
    async with slots:
        try:
            return 200, await asyncio.wait_for(work, timeout)
        except TimeoutError:
            return 504, None


async def whole_characters(pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    async for piece in pieces:
        if text := decoder.decode(piece):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text
