"""`/engine/live`: the events, their rate, and no work without watchers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import pytest

from quire.arrays import int32
from quire.engine.loop.snapshot import Branch, Pool, Snapshot
from quire.engine.loop.stats import EngineStats
from quire.errors import EngineDeadError
from quire.server.apis.admin import live
from quire.server.apis.admin.live import LiveSnapshots, Watcher, runs
from quire.server.args import ServerArgs
from tests.server.fakes import FakeClient, PlainTokenizer
from tests.server.inprocess import assert_error, connect, run
from tests.server.server_process import Server


def snapshot(time: float = 1.0, owner: Any = (0, 0, -2), steps: int = 1) -> Snapshot:
    cells = int32(owner)
    return Snapshot(
        time=time,
        block_size=16,
        budget=64,
        lanes=4,
        stats=EngineStats(steps=steps),
        pools=[Pool(None, len(cells), 1, cells, int32(cells > -2), int32(cells > -2))],
        running=[],
        waiting=[],
        step=None,
        prompt_step=None,
        firsts=[],
        tree=[Branch(-1, 2, 1, 0, int32([72, 105]))],
        tree_nodes=1,
    )


@dataclass
class LiveClient(FakeClient):
    """Returns the next of `snapshots`; repeats the last one."""

    snapshots: list[Snapshot | Exception] = field(default_factory=lambda: [snapshot()])
    asked: list[bool] = field(default_factory=list)

    async def snapshot(self, tokens: bool) -> Snapshot:
        self.asked.append(tokens)
        found = self.snapshots.pop(0) if len(self.snapshots) > 1 else self.snapshots[0]
        if isinstance(found, Exception):
            raise found
        return found


def watch(client: LiveClient, query: str = "frames=3", **args: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        async with connect(client, ServerArgs(**args)) as http:
            return await http.get(f"/engine/live?{query}")

    return run(go())


def events(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    return [json.loads(line[6:]) for line in response.text.splitlines() if line]


def test_the_first_event_has_all_fields_and_later_ones_the_changes() -> None:
    client = LiveClient(
        snapshots=[snapshot(1), snapshot(2, (0, 1, 1), 2), snapshot(3, (0, 1, 1), 3)]
    )
    first, second, third = events(watch(client))
    names = {
        "time",
        "engine",
        "rows",
        "stats",
        "running",
        "waiting",
        "step",
        "firsts",
        "tree",
        "pools",
    }
    assert set(first) == names | {"prompt_step"}
    assert first["engine"] == {"block_size": 16, "budget": 64, "lanes": 4}
    assert first["rows"]["tiers.disk_blocks"] == "Blocks in files"
    assert first["pools"][0]["runs"] == [[0, 2, 0, 1, 1], [2, 1, -2, 0, 0]]
    assert set(second) == {"time", "stats", "pools"}
    assert second["pools"][0]["runs"] == [[1, 2, 1, 1, 1]]
    assert set(third) == {"time", "stats"}


def test_an_unchanged_state_is_sent_once_a_second() -> None:
    client = LiveClient(snapshots=[snapshot(t) for t in (1, 1.3, 1.9, 2.1)])
    assert [event["time"] for event in events(watch(client, "frames=4"))] == [1, 2.1]


def test_runs_join_equal_neighbours() -> None:
    cells = np.stack([int32([5, 5, 5, 5, 1]), int32([1, 1, 2, 2, 1]), int32([1, 1, 1, 1, 1])])
    wanted = np.array([True, True, False, True, True])
    assert runs(cells, wanted) == [[0, 2, 5, 1, 1], [3, 1, 5, 2, 1], [4, 1, 1, 1, 1]]
    assert runs(cells, np.zeros(5, dtype=bool)) == []


def test_runs_of_cells_repaint_the_pool_exactly() -> None:
    generator = np.random.default_rng(1)
    watcher = Watcher(LiveSnapshots(LiveClient(), False), 10, None)  # type: ignore[arg-type]
    painted = np.zeros((3, 50), dtype=np.int32)
    for step in range(30):
        owner = generator.integers(-2, 3, 50) if step % 3 else np.full(50, step % 2)
        buffer = bytearray()
        watcher.write(buffer, [snapshot(10.0 * step, owner)])
        for pool in json.loads(buffer[6:]).get("pools", ()):
            for at, count, *value in pool["runs"]:
                painted[:, at : at + count] = np.array(value)[:, None]
        assert painted[0].tolist() == owner.tolist()


@pytest.mark.parametrize(("flag", "text"), [(False, None), (True, "Hi")])
def test_prompts_are_shown_only_where_that_was_asked_for(flag: bool, text: str | None) -> None:
    client = LiveClient(tokenizer=PlainTokenizer())
    client.snapshots[0].tree[0].tokens = int32([72, 105]) if flag else None  # type: ignore[union-attr]
    (event,) = events(watch(client, "frames=1", live_prompts=flag, generation_config="none"))
    assert client.asked == [flag]
    assert event["tree"]["branches"] == [[-1, 2, 1, 0, text]]


def test_an_engine_that_dies_ends_the_stream_with_an_error() -> None:
    client = LiveClient(snapshots=[snapshot(), EngineDeadError("gone")])
    first, last = events(watch(client, ""))
    assert "stats" in first
    assert "engine has stopped" in last["error"]["message"]


def test_an_engine_that_is_gone_or_stuck_is_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watch(LiveClient(alive=False)).status_code == 503
    assert watch(LiveClient(snapshots=[EngineDeadError("gone")])).status_code == 503

    async def never(tokens: bool) -> Snapshot:
        await asyncio.sleep(60)
        raise AssertionError

    client = LiveClient()
    client.snapshot = never  # type: ignore[method-assign]
    monkeypatch.setattr(live, "_PATIENCE", 0.05)
    response = watch(client)
    assert response.status_code == 503
    assert "does not answer" in response.json()["error"]["message"]


def test_queries_are_checked() -> None:
    assert_error(watch(LiveClient(), "rate=11"), 400, "rate", "invalid_value")
    assert_error(watch(LiveClient(), "frames=x"), 400, "frames", "invalid_value")
    assert_error(watch(LiveClient(), "every=1"), 400, "every", "unknown_parameter")


def test_the_route_needs_the_key_and_exists_only_with_the_page() -> None:
    assert watch(LiveClient(), api_key=("k",)).status_code == 401
    assert watch(LiveClient(), playground=False).status_code == 404


def test_watchers_share_snapshots_taken_only_for_them() -> None:
    async def go() -> tuple[int, int]:
        client = LiveClient()
        snapshots = LiveSnapshots(client, False)  # type: ignore[arg-type]
        await asyncio.gather(*(snapshots.look() for _ in range(10)))
        asked = len(client.asked)
        await asyncio.sleep(0.3)
        return asked, len(client.asked)

    assert run(go()) == (1, 1)


def test_watchers_are_limited_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_WATCHERS", 2)

    async def go() -> list[int]:
        async with connect(LiveClient()) as http:
            asked = [http.get("/engine/live?frames=3&rate=10") for _ in range(3)]
            early = [response.status_code for response in await asyncio.gather(*asked)]
            late = await http.get("/engine/live?frames=1")
            return [*sorted(early), late.status_code]

    assert run(go()) == [200, 200, 503, 200]


def test_closing_ends_its_streams() -> None:
    async def go() -> int:
        client = LiveClient()
        snapshots = LiveSnapshots(client, False)  # type: ignore[arg-type]
        watcher = Watcher(snapshots, 1, None)
        watcher.start()
        await watcher.ready()
        batches = watcher.batches()
        await anext(batches)
        asyncio.get_running_loop().call_later(0.05, snapshots.close)
        seen = [batch async for batch in batches]
        await watcher.close()
        await watcher.close()
        return len(seen) + snapshots.watchers

    assert run(go()) == 0


def test_a_real_engine_is_seen_at_work_and_does_not_keep_the_server(
    launch: Callable[..., Server],
) -> None:
    server = launch("--drain-timeout", "60", "--live-prompts")
    body = {
        "messages": [{"role": "user", "content": "Hello there"}],
        "max_tokens": 400,
        "stream": True,
    }
    with httpx.Client(base_url=server.url, timeout=60) as http:
        with (
            http.stream("POST", "/v1/chat/completions", json=body | {"ignore_eos": True}) as answer,
            http.stream("GET", "/engine/live") as view,
        ):
            state: dict[str, Any] = {}
            for line in view.iter_lines():
                if line:
                    state |= json.loads(line[6:])
                if state["running"] and state["running"][0][5] > 40:
                    break
            answer.close()
        assert state["step"]["generating"] == 1
        assert any("Hello there" in (text or "") for *_, text in state["tree"]["branches"])
        with http.stream("GET", "/engine/live") as view:
            next(view.iter_lines())
            assert server.stop() == 0
