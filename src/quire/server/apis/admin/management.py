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
from quire.errors import RequestError
from quire.features.weight_updates.calls import (
    SLEEP,
    STATE,
    WAKE_UP,
    Sleep,
    WakeUp,
    WeightsState,
    known_tags,
)
from quire.features.weight_updates.control import call_all
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
    """Frees the engine's devices for others. The engine's process gives its memory up if it has
    `enable_sleep_mode`, and ends otherwise.

    Raises:
        ApiError: 409, requests run, or another call is at it.
    """
    state = state_of(request)
    query = Query(request, "level", "tags", "mode", many=("tags",))
    level, tags = query.integer("level", 1, 1, 2), query.list("tags")
    mode = query.choice("mode", ("", "abort", "wait", "keep", "retract")) or None
    if state.client.config.args.enable_sleep_mode:
        asked = Sleep(level, known_tags(tags), mode)  # type: ignore[arg-type]
        return await _sleep_in_process(state, asked)
    if tags is not None or mode is not None:
        raise _process_only("tags" if tags is not None else "mode")
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


async def _sleep_in_process(state: ServerState, asked: Sleep) -> Response:
    if asked.mode is None and state.generations:
        raise ApiError(
            409, f"{len(state.generations)} requests run or wait.", code="requests_running"
        )
    try:
        found = await call_all(state.client, SLEEP, asked)
    except RequestError as error:
        if error.code == "requests_running":
            raise ApiError(409, str(error), code=error.code) from None
        raise
    return _told(state, found)


def _told(state: ServerState, found: WeightsState) -> Response:
    state.metrics.asleep.set(bool(found.asleep))
    return json_response(SleepState(bool(found.asleep), found.level))


def _process_only(param: str) -> ApiError:
    return ApiError(
        400, f"'{param}' needs an engine that sleeps in its process (--enable-sleep-mode).",
        param=param, code="unsupported_parameter",
    )  # fmt: skip


async def wake_up(request: Request) -> Response:
    """Wakes the engine, or starts it again, and answers when it takes requests."""
    state = state_of(request)
    tags = Query(request, "tags", many=("tags",)).list("tags")
    if state.client.config.args.enable_sleep_mode:
        asked = WakeUp(() if tags is None else known_tags(tags))
        return _told(state, await call_all(state.client, WAKE_UP, asked))
    if tags is not None:
        raise _process_only("tags")
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
    if state.client.config.args.enable_sleep_mode:
        return _told(state, await call_all(state.client, STATE, None))
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
