"""Calls about weights to all engines of a server, for its routes."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec

from quire.errors import ModelError, RequestError
from quire.features.call import Callers, CallType
from quire.features.weight_updates.calls import JOIN, UPDATE, UpdateWeights, WeightsState
from quire.features.weight_updates.payloads import JoinGroup

_log = logging.getLogger("quire.server")

Asked = TypeVar("Asked")
Answered = TypeVar("Answered")


async def call_all(client: Callers, call: CallType[Asked, Answered], asked: Asked) -> Answered:
    """Makes a call to all live engines at once. Returns the first one's answer.

    Raises:
        RequestError: an update does not fit the model.
        QuireError: an engine refused the call.
        EngineDeadError: no engine is alive.
    """
    client.check_alive()
    engines = [engine for engine in client.replicas if engine.alive]
    try:
        answers = await asyncio.gather(*(engine.call(call, asked) for engine in engines))
    except ModelError as error:
        raise RequestError(str(error), code="weights_do_not_fit") from None
    return answers[0]


async def update(client: Callers, asked: UpdateWeights) -> WeightsState:
    """Updates the weights of all engines, which give the update the same id."""
    if not asked.id:
        asked = msgspec.structs.replace(asked, id=secrets.token_hex(16))
    return await call_all(client, UPDATE, asked)


async def join(client: Callers, asked: JoinGroup) -> None:
    """Makes all ranks of all engines join a group. Ranks of later engines follow."""
    client.check_alive()
    ranks = client.config.args.ranks
    engines = [engine for engine in client.replicas if engine.alive]
    await asyncio.gather(
        *(
            engine.call(
                JOIN, msgspec.structs.replace(asked, rank_offset=asked.rank_offset + place * ranks)
            )
            for place, engine in enumerate(engines)
        )
    )


def world_size(client: Callers) -> int:
    """Returns the number of all live engines' ranks."""
    alive = sum(engine.alive for engine in client.replicas)
    return int(client.config.args.ranks) * alive


def join_later(client: Callers, asked: JoinGroup) -> None:
    """Begins to join a group, and does not wait for it. An error is logged."""
    _begin(join(client, asked), "a group could not be joined")


def update_later(client: Callers, asked: UpdateWeights) -> None:
    """Begins an update, and does not wait for it. An error is logged. Updates run in order."""
    _begin(update(client, asked), "the weights could not be updated")


_running: set[asyncio.Task[Any]] = set()
"""Keeps tasks until they end."""


def _begin(work: Coroutine[Any, Any, Any], trouble: str) -> None:
    task = asyncio.create_task(work)
    _running.add(task)

    def end(ended: asyncio.Task[Any]) -> None:
        _running.discard(ended)
        if not ended.cancelled() and ended.exception() is not None:
            _log.error("%s: %s", trouble, ended.exception())

    task.add_done_callback(end)
