"""Chat completions that can be fetched later: bounded in number, bytes and age. They live in this
process's memory and end with it."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.server.errors import ApiError
from quire.server.responses import ChatChoice, Envelope


@dataclass(slots=True)
class StoredChat:
    """An answer with the messages it answers, as templates take them. owner: who may see it."""

    envelope: Envelope[ChatChoice]
    messages: list[dict[str, Any]]
    owner: bytes
    size: int = 0
    created: float = 0.0

    def measure(self) -> int:
        """About how many bytes it takes."""
        return len(msgspec.json.encode(self.envelope)) + len(msgspec.json.encode(self.messages))


class ChatStore:
    """The oldest go first, whenever one comes in or is looked for."""

    def __init__(
        self,
        max_items: int,
        max_bytes: int,
        max_age: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_items = max_items
        self.max_bytes = max_bytes
        self.max_age = max_age
        self.size = 0
        self._clock = clock
        self._chats: OrderedDict[str, StoredChat] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chats)

    def add(self, chat: StoredChat) -> None:
        chat.created = self._clock()
        self._chats[chat.envelope.id] = chat
        self.resize(chat)
        self._expire()

    def resize(self, chat: StoredChat) -> None:
        """It has changed."""
        size = chat.measure()
        self.size += size - chat.size
        chat.size = size
        while len(self._chats) > self.max_items or self.size > self.max_bytes:
            self._drop(next(iter(self._chats)))

    def get(self, id: str, owner: bytes) -> StoredChat:
        """Raises ApiError, 404, naming the id."""
        self._expire()
        chat = self._chats.get(id)
        if chat is None or chat.owner != owner:
            raise ApiError(
                404,
                f"Chat completion with id '{id[:200]}' not found: it was never stored, or is no "
                "longer (see 'completion_id').",
                param="completion_id",
                code="completion_not_found",
            )
        return chat

    def all(self, owner: bytes) -> list[StoredChat]:
        """The oldest first."""
        self._expire()
        return [chat for chat in self._chats.values() if chat.owner == owner]

    def remove(self, chat: StoredChat) -> None:
        if chat.envelope.id in self._chats:
            self._drop(chat.envelope.id)

    def _drop(self, id: str) -> None:
        self.size -= self._chats.pop(id).size

    def _expire(self) -> None:
        oldest = self._clock() - self.max_age
        while self._chats and next(iter(self._chats.values())).created <= oldest:
            self._drop(next(iter(self._chats)))
