"""Lesson 13: its script, and the answers to its exercises."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from types import ModuleType

import pytest

from lessons import mine


def test_the_lesson_prints_its_claims(
    lesson: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    lesson.main([])
    assert "| Quire  | " in capsys.readouterr().out


def test_the_server_has_at_most_60_lines() -> None:
    assert len(inspect.getsource(mine.Server).splitlines()) <= 60


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_events(answers: ModuleType, size: int) -> None:
    data = b': hello\n\ndata: {"text": "\xc3\xa4"}\n\ndata: 7\n\ndata: [DONE]\n\ndata: 8\n\n'
    chunks = [data[i : i + size] for i in range(0, len(data), size)]
    assert list(answers.events(chunks)) == [{"text": "ä"}, 7]


def test_at_most(answers: ModuleType) -> None:
    async def work(event: asyncio.Event) -> int:
        await event.wait()
        return 5

    async def run() -> None:
        slots, event = asyncio.Semaphore(1), asyncio.Event()
        first = asyncio.create_task(answers.at_most(slots, work(event), 60))
        await asyncio.sleep(0)
        assert await answers.at_most(slots, work(event), 60) == (503, None)
        event.set()
        assert await first == (200, 5)
        assert await answers.at_most(slots, work(asyncio.Event()), 0.01) == (504, None)
        assert await answers.at_most(slots, work(event), 60) == (200, 5)

    asyncio.run(run())


def test_whole_characters(answers: ModuleType) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b"a\xe2", b"\x82", b"\xac", b"", b"b\xf0\x9f"):
            yield piece

    async def run() -> list[str]:
        return [text async for text in answers.whole_characters(pieces())]

    assert asyncio.run(run()) == ["a", "€", "b", "\ufffd"]
