"""`GET /engine/live`: snapshots of the engine as server-sent events.

Each watcher asks for a snapshot a few times a second; watchers that ask at about the same time
share one. So nothing runs without watchers, and a restarted engine needs no state of them. An event
holds the changes since the watcher's last one.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from quire.arrays import Int32
from quire.features.registry import installed_features
from quire.features.spec import resolve
from quire.server.errors import ApiError
from quire.server.http.query import Query
from quire.server.http.sse import EventStream, start_stream
from quire.server.state import state_of

if TYPE_CHECKING:
    from quire.engine.loop.snapshot import Pool, Snapshot
    from quire.engine.process.client import EngineClient

MOST_WATCHERS = 16
_FASTEST = 10
"""Most events a second."""
_PATIENCE = 5.0
"""Seconds to wait for the engine's answer."""
_QUIET = 1.0
"""Most seconds between events, so that both sides notice a broken connection."""
_DECODED = 2048


class LiveSnapshots:
    """Takes snapshots of the engine for all watchers of this process."""

    def __init__(self, client: EngineClient, prompts: bool) -> None:
        self._client = client
        self._prompts = prompts and client.tokenizer is not None
        self._asked = 0.0
        self._asking: asyncio.Future[Snapshot] | None = None
        self._decode = functools.lru_cache(_DECODED)(self._text)
        self.watchers = 0
        self.closed = asyncio.Event()

    def close(self) -> None:
        """Ends all streams, which would never end by themselves."""
        self.closed.set()

    async def look(self) -> Snapshot:
        """Returns a snapshot, which may be as old as the shortest pause between events.

        Raises:
            EngineDeadError: the engine is gone.
            ApiError: it does not answer.
        """
        now = time.monotonic()
        asking = self._asking
        if asking is None or (asking.done() and now - self._asked >= 0.9 / _FASTEST):
            self._asked = now
            asking = self._asking = asyncio.ensure_future(self._ask())
        return await asyncio.shield(asking)

    async def _ask(self) -> Snapshot:
        try:
            async with asyncio.timeout(_PATIENCE):
                return await self._client.snapshot(self._prompts)
        except TimeoutError:
            raise ApiError(503, "The engine does not answer.") from None

    def text(self, tokens: Int32 | None) -> str | None:
        return None if tokens is None else self._decode(tokens.tobytes())

    def _text(self, tokens: bytes) -> str:
        tokenizer = self._client.tokenizer
        if tokenizer is None:
            return ""
        return tokenizer.decode(np.frombuffer(tokens, dtype=np.int32).tolist(), False)


class Watcher:
    """One watcher's stream: a source of snapshots, and the state that the watcher knows.

    frames: number of events after which the stream ends.
    """

    def __init__(self, snapshots: LiveSnapshots, rate: int, frames: int | None) -> None:
        self._snapshots = snapshots
        self._pause = 1 / rate
        self._frames = frames
        self._first: Snapshot | None = None
        self._sent: dict[str, bytes] = {}
        self._cells: list[tuple[int, Int32]] = []
        self._last = 0.0
        self._open = False

    def start(self) -> None:
        if self._snapshots.watchers >= MOST_WATCHERS:
            raise ApiError(503, f"There are {MOST_WATCHERS} watchers already.", code="watchers")
        self._snapshots.watchers += 1
        self._open = True

    async def ready(self) -> None:
        self._first = await self._snapshots.look()

    async def close(self) -> None:
        if self._open:
            self._open = False
            self._snapshots.watchers -= 1

    async def batches(self) -> AsyncIterator[list[Snapshot]]:
        snapshot, sent = self._first, 0
        while snapshot is not None:
            yield [snapshot]
            sent += 1
            if sent == self._frames or await self._ended():
                return
            snapshot = await self._snapshots.look()

    async def _ended(self) -> bool:
        """Waits until the next event is due; returns whether the server closed meanwhile."""
        try:
            async with asyncio.timeout(self._pause):
                return await self._snapshots.closed.wait()
        except TimeoutError:
            return False

    def write(self, buffer: bytearray, batch: list[Snapshot]) -> None:
        """Writes an event with the changes; without changes only after a quiet second."""
        snapshot = batch[-1]
        parts = {name: make(snapshot) for name, make in self._parts().items()}
        sent, self._sent = self._sent, parts
        fresh = {name: data for name, data in parts.items() if sent.get(name) != data}
        fresh["pools"] = msgspec.json.encode(self._pools(snapshot.pools))
        if fresh["pools"] == b"[]":
            del fresh["pools"]
        if not fresh and snapshot.time - self._last < _QUIET:
            return
        self._last = snapshot.time
        buffer += b'data: {"time":%.3f' % snapshot.time
        for name, data in fresh.items():
            buffer += b',"%s":%s' % (name.encode(), data)
        buffer += b"}\n\n"

    def _parts(self) -> dict[str, Callable[[Snapshot], bytes]]:
        encode = msgspec.json.encode
        return {
            "engine": lambda s: encode(
                {"block_size": s.block_size, "budget": s.budget, "lanes": s.lanes}
            ),
            "rows": lambda s: encode(live_rows()),
            "stats": lambda s: encode(s.stats),
            "running": lambda s: encode(s.running),
            "waiting": lambda s: encode(s.waiting),
            "step": lambda s: encode(s.step),
            "prompt_step": lambda s: encode(s.prompt_step),
            "firsts": lambda s: encode(s.firsts),
            "tree": lambda s: encode(
                {
                    "nodes": s.tree_nodes,
                    "branches": [
                        (b.parent, b.length, b.users, b.hidden, self._snapshots.text(b.tokens))
                        for b in s.tree
                    ],
                }
            ),
        }

    def _pools(self, pools: list[Pool]) -> list[dict[str, Any]]:
        """Returns the pools that have changed, with their changed cells."""
        old, self._cells = self._cells, [(pool.per_cell, _cells(pool)) for pool in pools]
        out = []
        for index, (pool, (per_cell, cells)) in enumerate(zip(pools, self._cells, strict=True)):
            changed = np.ones(cells.shape[1], dtype=bool)
            if index < len(old) and (old[index][0], old[index][1].shape) == (per_cell, cells.shape):
                changed = (old[index][1] != cells).any(0)
            if changed.any():
                out.append(
                    {
                        "index": index,
                        "window": pool.window,
                        "blocks": pool.blocks,
                        "per_cell": pool.per_cell,
                        "cells": cells.shape[1],
                        "runs": runs(cells, changed),
                    }
                )
        return out


@functools.cache
def live_rows() -> dict[str, str]:
    """Returns the names under which the live view shows features' statistics, by statistic."""
    return {
        f"{spec.stats_name}.{field}": name
        for spec in installed_features()
        if spec.live_rows
        for field, name in resolve(spec.live_rows).items()
    }


def _cells(pool: Pool) -> Int32:
    """Returns a pool's cells, int32 [3, cells]: owner, holders, filled."""
    cells: Int32 = np.stack([pool.owner, pool.holders, pool.filled])
    return cells


def runs(cells: Int32, wanted: Any) -> list[list[int]]:
    """Returns the wanted cells as runs of equal ones: [first, count, owner, holders, filled].

    Args:
        cells: int32 [3, cells].
        wanted: bool [cells].
    """
    places = np.flatnonzero(wanted)
    values = cells[:, places]
    begins = np.ones(len(places), dtype=bool)
    begins[1:] = (np.diff(places) != 1) | (values[:, 1:] != values[:, :-1]).any(0)
    starts = np.flatnonzero(begins)
    counts = np.diff(np.append(starts, len(places)))
    found: list[list[int]] = np.column_stack([places[starts], counts, values[:, starts].T]).tolist()
    return found


async def live(request: Request) -> Response:
    """Streams snapshots. Query: `rate`, the most events a second; `frames`, the number of
    events."""
    state = state_of(request)
    query = Query(request, "rate", "frames")
    rate = query.integer("rate", _FASTEST, 1, _FASTEST)
    frames = query.integer("frames", 0, 0)
    state.check_alive()
    watcher = Watcher(request.app.state.live_snapshots, rate, frames or None)
    await start_stream(request, watcher)
    stream = EventStream(watcher, watcher.write, lambda buffer: None, metrics=state.metrics)
    # A proxy that gathered events would defeat them.
    stream.headers["x-accel-buffering"] = "no"
    return stream
