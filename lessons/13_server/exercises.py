"""Three exercises on serving.

python -m lessons check 13
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from typing import Any


def events(chunks: Sequence[bytes]) -> Iterator[Any]:
    """Yields the JSON values of a stream of server-sent events, until `data: [DONE]`.

    chunks: as they came from a socket: cut anywhere, within a line or a character. An event is one
    line `data: ...`, and an empty line behind it; lines that begin with a colon are comments.
    """
    raise NotImplementedError


async def at_most(
    slots: asyncio.Semaphore, work: Awaitable[Any], timeout: float
) -> tuple[int, Any]:
    """Returns the status and the result of a request's work.

    200 and the result; 503 and None, at once, where all slots are taken, without starting the work;
    504 and None where it took longer than `timeout` seconds. A slot is free again in any case.
    """
    raise NotImplementedError


def whole_characters(pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Yields the text of a UTF-8 stream as it comes, holding back bytes of unfinished characters.

    pieces: a token's bytes each; a character may be spread over several tokens. Nothing empty is
    yielded; what is unfinished at the end becomes U+FFFD.
    """
    raise NotImplementedError
