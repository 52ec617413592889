"""Keeps the leases. The prefix tree evicts the blocks under them last."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.cache import BlockManager
from quire.cache.node import Node
from quire.config import EngineConfig
from quire.executor import Capacity, Executor
from quire.features.call import CallType, RequestField
from quire.features.conversation_leases.args import LeaseArgs
from quire.features.conversation_leases.calls import CONVERSATION, END
from quire.features.conversation_leases.stats import LeaseStats
from quire.features.loop_feature import EngineInterface, LoopFeature
from quire.request import FinishReason, Request
from quire.scheduler import Feature


@dataclass(slots=True)
class _Lease:
    """A conversation's lease.

    Attributes:
        last: the last node of the conversation's path in the prefix tree.
        expires: time (`time.monotonic`) at which the lease ends without another turn.
    """

    last: Node
    expires: float


class ConversationLeases(Feature, LoopFeature):
    """Leases the path of each conversation's last turn.

    A lease only changes the order of eviction, so no request waits for one. If all leases together
    hold more than their share of the cache, those of the longest idle conversations end.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._args = LeaseArgs.of(config.args)
        self._conversations: dict[str, str] = {}
        self._leases: OrderedDict[str, _Lease] = OrderedDict()
        self._stats = LeaseStats()

    def start(self, executor: Executor, capacity: Capacity) -> Feature | None:
        return self if self._args.conversation_leases else None

    # -- the scheduler -------------------------------------------------------------------------

    def attach(self, blocks: BlockManager, wake: Callable[[str], None]) -> None:
        self._blocks = blocks
        self._limit = int(blocks.usage()[0].total * self._args.conversation_leases)

    def after_update(self, step_id: int) -> None:
        if self._leases:
            self._expire(time.monotonic())

    def finish(self, request: Request) -> None:
        conversation = self._conversations.pop(request.request_id, None)
        if conversation is None or not self._blocks.caching:
            return
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            tokens = request.tokens.view(0, request.computed)
            match = self._blocks.match(request.namespace, tokens, len(tokens))
            self._lease(conversation, match.tail or match.node)

    def forget(self) -> None:
        for conversation in list(self._leases):
            self._end(conversation)

    def _lease(self, conversation: str, last: Node) -> None:
        """Leases a path in place of the conversation's earlier one."""
        self._blocks.tree.lease(last)
        self._end(conversation)
        expires = time.monotonic() + self._args.conversation_lease_seconds
        self._leases[conversation] = _Lease(last, expires)
        while self._blocks.tree.num_leased > self._limit:
            self._end(next(iter(self._leases)))
            self._stats.given_up += 1

    def _end(self, conversation: str) -> bool:
        """Ends a conversation's lease. Returns whether it had one."""
        lease = self._leases.pop(conversation, None)
        if lease is not None:
            self._blocks.tree.end_lease(lease.last)
        return lease is not None

    def _expire(self, now: float) -> None:
        while self._leases:
            conversation = next(iter(self._leases))
            if self._leases[conversation].expires > now:
                return
            self._end(conversation)
            self._stats.expired += 1

    # -- the loop ------------------------------------------------------------------------------

    def calls(self) -> Mapping[CallType[Any, Any], Callable[[EngineInterface, Any], Any]]:
        return {END: lambda engine, conversation: self._end(conversation)}

    def fields(self) -> Mapping[RequestField[Any], Callable[[str, Any], None]]:
        return {CONVERSATION: self._join}

    def _join(self, request_id: str, conversation: str) -> None:
        self._conversations[f"{request_id}/0"] = conversation

    def stats(self) -> dict[str, Any]:
        self._expire(time.monotonic())
        self._stats.leases = len(self._leases)
        self._stats.blocks = self._blocks.tree.num_leased
        return {"conversation_leases": self._stats}
