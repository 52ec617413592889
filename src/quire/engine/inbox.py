"""Where tokens wait until the stream that they belong to reads them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from quire.errors import QuireError
from quire.plan import Float32, Logprobs


@dataclass(slots=True)
class News:
    """What came for one completion since it was last read."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    reason: str | None = None
    stop_token: int | None = None
    num_cached_tokens: int = 0
    queued: float = 0.0
    pooled: Float32 | None = None


class Inbox:
    """What came for one request. One reader."""

    def __init__(self) -> None:
        self.news: dict[int, News] = {}
        self.prompt_logprobs: list[Logprobs] = []
        self.error: QuireError | None = None
        self.arrived = asyncio.Event()

    def of(self, index: int) -> News:
        self.arrived.set()
        news = self.news.get(index)
        if news is None:
            news = self.news[index] = News()
        return news

    def fail(self, error: QuireError) -> None:
        self.error = error
        self.arrived.set()
