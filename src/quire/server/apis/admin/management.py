"""Routes for who runs the server: its version, its load, its settings, its cache and its sleep."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire import __version__
from quire.checkpoint_digest import checkpoint_digest
from quire.config import EngineArgs, EngineConfig
from quire.server.errors import ApiError, stuck_error
from quire.server.http.query import Query
from quire.server.http.sse import json_response
from quire.server.state import ServerState, state_of
from quire.system import open_regular, stored_weights

_TIMEOUT = 5.0
"""Seconds that the engine gets to answer."""


class ServerVersion(msgspec.Struct):
    version: str


class Load(msgspec.Struct):
    """Requests of all engines, a completion each. server_load: running and waiting ones. kv_tokens:
    tokens that the KV cache has room for. checkpoint: a digest that is equal for servers of one."""

    server_load: int
    running: int
    waiting: int
    kv_tokens: int
    checkpoint: str


class ServerInfo(msgspec.Struct):
    """engine: its settings, as they were resolved; `args` as they were given."""

    version: str
    model: str
    engine: EngineConfig


class CacheResetAnswer(msgspec.Struct):
    """reset: false where prefixes of requests that run are left."""

    reset: bool


class SleepState(msgspec.Struct):
    """level: 1 or 2 while it sleeps, else 0."""

    is_sleeping: bool
    level: int


async def version(request: Request) -> Response:
    return json_response(ServerVersion(__version__))


async def ping(request: Request) -> Response:
    """Answers as `/health` does, with an empty body."""
    state_of(request).check_health()
    return Response(media_type="text/plain")


async def load(request: Request) -> Response:
    state = state_of(request)
    state.check_alive()
    try:
        async with asyncio.timeout(_TIMEOUT):
            stats = await state.client.stats()
    except TimeoutError:
        raise stuck_error() from None
    config = state.client.config
    tokens = min(stats.blocks_total, default=0) * config.block_size
    digest = await asyncio.to_thread(checkpoint_digest, config)
    found = Load(stats.running + stats.waiting, stats.running, stats.waiting, tokens, digest)
    return json_response(found)


async def server_info(request: Request) -> Response:
    state = state_of(request)
    config = state.client.config
    secrets = {f.name: f.default for f in fields(EngineArgs) if f.metadata.get("secret")}
    config = replace(config, args=config.args.replace(**secrets))
    return json_response(ServerInfo(__version__, state.model_name, config))


async def reset_prefix_cache(request: Request) -> Response:
    """Forgets all prefixes that no running request uses."""
    state = state_of(request)
    try:
        async with asyncio.timeout(_TIMEOUT):
            return json_response(CacheResetAnswer(await state.client.reset_prefix_cache()))
    except TimeoutError:
        raise stuck_error() from None


async def sleep(request: Request) -> Response:
    """Ends the engine's process, so that its devices are free for others.

    Raises:
        ApiError: 409, requests run, or another call is at it.
    """
    state = state_of(request)
    level = Query(request, "level").integer("level", 1, 1, 2)
    with _alone(state):
        if not state.client.asleep:
            await _fall_asleep(state)
        state.sleep_level = level
        await asyncio.to_thread(_advise, state.client.config, keep=level == 1)
    state.metrics.asleep.set(1)
    return json_response(SleepState(True, level))


async def _fall_asleep(state: ServerState) -> None:
    client = state.client
    client.asleep = True  # what comes from here on is refused
    try:
        async with asyncio.timeout(_TIMEOUT):
            stats = await client.stats()
        running = stats.running + stats.waiting + len(state.generations)
        if running:
            raise ApiError(409, f"{running} requests run or wait.", code="requests_running")
    except BaseException as error:
        client.asleep = False
        if isinstance(error, TimeoutError):
            raise stuck_error() from None
        raise
    await client.sleep()


async def wake_up(request: Request) -> Response:
    """Starts the engine again, and answers when it takes requests."""
    state = state_of(request)
    Query(request)
    with _alone(state):
        if state.client.asleep:
            try:
                await state.client.wake()
            except BaseException:
                # The host goes on trying, as after a death.
                state.client.asleep = False
                raise
            finally:
                state.sleep_level = 0
                state.metrics.asleep.set(0)
    return json_response(SleepState(False, 0))


async def is_sleeping(request: Request) -> Response:
    state = state_of(request)
    return json_response(SleepState(state.client.asleep, state.sleep_level))


@contextlib.contextmanager
def _alone(state: ServerState) -> Iterator[None]:
    """Keeps other calls that change the sleep out."""
    if any(engine.host is None for engine in state.client.replicas):
        raise ApiError(
            400, "With several API processes (--api-workers) the engine cannot sleep.",
            code="unsupported",
        )  # fmt: skip
    if state.changing_sleep:
        raise ApiError(409, "The engine is falling asleep or waking up.", code="sleep_changing")
    state.changing_sleep = True
    try:
        yield
    finally:
        state.changing_sleep = False


def _advise(config: EngineConfig, *, keep: bool) -> None:
    """Asks the system to keep the files of weights in memory, or to let go of them."""
    advice = os.POSIX_FADV_WILLNEED if keep else os.POSIX_FADV_DONTNEED
    for path in stored_weights(Path(config.model_path)):
        with contextlib.suppress(OSError), open_regular(path) as file:
            os.posix_fadvise(file.fileno(), 0, 0, advice)
