"""The limits of the response store, and readers that follow a response."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from quire.server.apis.responses.events import ResponseEvent, ResponseWriter
from quire.server.apis.responses.items import (
    InputTokensDetails,
    MessageItem,
    OutputTokensDetails,
    Response,
    ResponseUsage,
    parse_item,
)
from quire.server.apis.responses.store import ResponseStore, StoredResponse
from quire.server.errors import ApiError
from tests.server.inprocess import run

USAGE = ResponseUsage(1, InputTokensDetails(), 1, OutputTokensDetails(), 2)


def response(id: str, status: str = "in_progress") -> Response:
    return Response(
        id=id,
        created_at=0,
        status=status,
        background=True,
        instructions=None,
        max_output_tokens=None,
        metadata={},
        model="m",
        output=[],
        parallel_tool_calls=True,
        previous_response_id=None,
        reasoning={},
        store=True,
        temperature=1.0,
        text={},
        tool_choice="auto",
        tools=[],
        top_logprobs=0,
        top_p=1.0,
        truncation="disabled",
    )


def record(id: str, text: str = "hi", *, done: bool = True) -> StoredResponse:
    item: Any = parse_item({"role": "user", "content": text, "id": f"msg_{id}"})
    made = StoredResponse(ResponseWriter(response(id)), (item,), b"")
    if done:
        made.writer.text("answer", [])
        made.writer.finish(USAGE)
    return made


def ids(store: ResponseStore, *names: str) -> list[str]:
    """Returns the ids that are stored; for the others, the error names them."""
    found = []
    for name in names:
        with contextlib.suppress(ApiError):
            found.append(store.get(name, "id", b"").response.id)
    for name in set(names) - set(found):
        with pytest.raises(ApiError, match=name) as error:
            store.get(name, "id", b"")
        assert error.value.status == 404
    return found


def test_the_oldest_goes_first() -> None:
    store = ResponseStore(2, 10**9, 1e9)
    for name in "abc":
        store.add(record(name))
    assert ids(store, "a", "b", "c") == ["b", "c"]


def test_bytes_are_bounded() -> None:
    store = ResponseStore(100, 50_000, 1e9)
    for i in range(20):
        store.add(record(str(i), "x" * 10_000))
        assert store.size <= 50_000
    assert 1 <= len(store) <= 4
    store.add(record("huge", "x" * 60_000))
    assert len(store) == 0
    assert store.size == 0


def test_age() -> None:
    now = [0.0]
    store = ResponseStore(100, 10**9, 60.0, clock=lambda: now[0])
    store.add(record("a"))
    now[0] = 59.0
    store.add(record("b"))
    assert ids(store, "a", "b") == ["a", "b"]
    now[0] = 61.0
    assert ids(store, "a", "b") == ["b"]
    assert len(store) == 1


def test_running_ones_stay_and_are_bounded() -> None:
    store = ResponseStore(2, 10**9, 1e9)
    running = [record(name, done=False) for name in "ab"]
    for one in running:
        store.add(one)
    with pytest.raises(ApiError) as error:
        store.add(record("c", done=False))
    assert error.value.status == 429
    store.add(record("d"))
    assert ids(store, "a", "b", "d") == ["a", "b"]
    running[0].writer.finish(USAGE)
    store.grow(running[0], running[0].writer.take())
    store.add(record("e", done=False))
    assert ids(store, "a", "b", "e") == ["b", "e"]


def test_events_of_running_ones_count() -> None:
    store = ResponseStore(100, 10_000, 1e9)
    one = record("a", done=False)
    store.add(one)
    store.grow(one, [ResponseEvent("x", b"x" * 20_000)])
    assert store.size > 20_000
    with pytest.raises(ApiError, match="background"):
        store.add(record("b", done=False))
    one.writer.finish(USAGE)
    store.grow(one, one.writer.take())
    assert store.size == 0


def test_only_output_can_be_referenced() -> None:
    store = ResponseStore(100, 10**9, 1e9)
    one = record("a")
    store.add(one)
    said = one.output[0]
    assert isinstance(said, MessageItem)
    assert said.text == "answer"
    assert store.item(said.id or "", b"") == said
    assert store.item("msg_a", b"") is None
    store.remove(one)
    assert store.item(said.id or "", b"") is None
    assert store.size == 0


def test_watching() -> None:
    async def go() -> tuple[list[int], list[int]]:
        one = record("a", done=False)
        one.events = [ResponseEvent(str(i), b"") for i in range(3)]
        early: list[int] = []
        late: list[int] = []

        async def watch(after: int, seen: list[int]) -> None:
            async for events in one.watch(after):
                seen += [int(event.type) for event in events]

        tasks = [asyncio.create_task(watch(-1, early)), asyncio.create_task(watch(3, late))]
        for i in range(3, 6):
            await asyncio.sleep(0)
            one.append([ResponseEvent(str(i), b"")])
        one.response.status = "completed"
        one.append([])
        await asyncio.gather(*tasks)
        return early, late

    assert run(go()) == (list(range(6)), [4, 5])
