"""The state that a WebSocket keeps for the turns of one stream."""

from __future__ import annotations

import uuid
from collections import OrderedDict

from quire.server.apis.responses.events import ResponseWriter
from quire.server.apis.responses.items import Item
from quire.server.apis.responses.steering import Steer
from quire.server.apis.responses.store import ResponseStore, StoredResponse
from quire.server.chat.prompt_memo import PromptMemo
from quire.server.errors import ApiError

CONVERSATION_KEY = "quire.conversation"
"""Scope entry with the `SocketConversation` of a turn."""
MAX_RESPONSES = 64
"""Most responses that a connection keeps."""


class SocketConversation:
    """The state that a connection keeps for the turns of one stream.

    Attributes:
        id: names the conversation to the engine, which keeps its KV.
        responses: the connection's responses, which all its streams share.
        memo: tokens of the conversation so far.
        generate: False only computes the prompt of the current turn.
        active: the response of the current or the last turn.
        steers: steering input for the active response.
        held: steering input for responses that wait for results of tools, by their ids.
    """

    def __init__(self, responses: OrderedDict[str, StoredResponse]) -> None:
        self.id = uuid.uuid4().hex
        self.responses = responses
        self.memo = PromptMemo()
        self.generate = True
        self.active: StoredResponse | None = None
        self.steers: list[Steer] = []
        self.held: OrderedDict[str, list[Steer]] = OrderedDict()

    @property
    def active_writer(self) -> ResponseWriter | None:
        return None if self.active is None else self.active.writer

    @property
    def active_id(self) -> str | None:
        return None if self.active is None else self.active.response.id

    @property
    def steer_size(self) -> int:
        """Number of characters of all steering input that waits."""
        waiting = (self.steers, *self.held.values())
        return sum(steer.size for steers in waiting for steer in steers)

    def take_steers(self) -> list[Steer]:
        steers, self.steers = self.steers, []
        return steers

    def hold(self, response: str, steers: list[Steer]) -> None:
        """Keeps steering input until a turn continues a response."""
        self.held[response] = steers
        while len(self.held) > MAX_RESPONSES:
            self.held.popitem(last=False)

    def keep(self, stored: StoredResponse) -> None:
        self.responses[stored.response.id] = stored
        while len(self.responses) > MAX_RESPONSES:
            self.responses.popitem(last=False)


class SocketStore:
    """Finds responses and items of a connection, then those of the server's store."""

    def __init__(self, conversation: SocketConversation, store: ResponseStore) -> None:
        self._own = conversation.responses
        self._store = store

    def get(self, id: str, param: str, owner: bytes) -> StoredResponse:
        stored = self._own.get(id)
        if stored is not None:
            return stored
        try:
            return self._store.get(id, param, owner)
        except ApiError as error:
            raise ApiError(
                400, str(error), param=param, code="previous_response_not_found"
            ) from None

    def item(self, id: str, owner: bytes) -> Item | None:
        found = (item for each in self._own.values() for item in each.output if item.id == id)
        return next(found, None) or self._store.item(id, owner)
