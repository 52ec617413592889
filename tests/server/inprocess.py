"""Requests to the application in this process, over the fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from quire.server.app import build_app
from quire.server.args import ServerArgs
from tests.server.fakes import FakeClient

PROMPT = {"prompt": [1, 2, 3]}


@asynccontextmanager
async def connect(
    client: FakeClient, args: ServerArgs | None = None, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(client, args or ServerArgs())  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", **options
    ) as http:
        yield http


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def post(path: str, body: Any, client: FakeClient | None = None, **options: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        async with connect(client or FakeClient(), **options) as http:
            return await http.post(path, json=body)

    return run(go())


def assert_error(response: httpx.Response, status: int, param: str | None, code: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code)
    if param:
        assert param.split(".")[-1] in error["message"].lower()
