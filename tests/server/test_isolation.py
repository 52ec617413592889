"""No API key sees, continues, changes or ends another key's stored objects."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from quire.server.args import ServerArgs
from tests.server.fakes import FakeClient, PlainTokenizer
from tests.server.inprocess import connect, run

ARGS = ServerArgs(api_key=("mine", "yours"))


def _as(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("background", [False, True])
def test_stored_responses_are_visible_to_their_key_only(background: bool) -> None:
    engine = FakeClient(tokenizer=PlainTokenizer(), free=1 if background else 100)

    async def go() -> None:
        async with connect(engine, ARGS) as http:
            body = {"input": "hi", "background": background}
            made = (await http.post("/v1/responses", json=body, headers=_as("mine"))).json()
            if background:
                await asyncio.sleep(0.05)
            one = f"/v1/responses/{made['id']}"

            def asks(key: str) -> list[tuple[str, str, Any]]:
                more = {"input": "more", "previous_response_id": made["id"]}
                asks: list[tuple[str, str, Any]] = [
                    ("GET", one, None),
                    ("GET", f"{one}?stream=true", None),
                    ("GET", f"{one}/input_items", None),
                    ("POST", "/v1/responses", more),
                    ("POST", "/v1/responses/input_tokens", more),
                    ("POST", f"{one}/cancel", None),
                    ("DELETE", one, None),
                ]
                if not background:
                    item = {"type": "item_reference", "id": made["output"][0]["id"]}
                    asks.append(("POST", "/v1/responses", {"input": [item]}))
                return asks

            for method, path, json in asks("yours"):
                answer = await http.request(method, path, json=json, headers=_as("yours"))
                assert answer.status_code == 404, (method, path, answer.text)
            found = await http.get(one, headers=_as("mine"))
            assert found.json()["status"] == ("in_progress" if background else "completed")
            assert (await http.delete(one, headers=_as("mine"))).status_code == 200

    run(go())


def test_stored_chats_are_visible_to_their_key_only() -> None:
    async def go() -> None:
        async with connect(FakeClient(tokenizer=PlainTokenizer()), ARGS) as http:
            body = {"messages": [{"role": "user", "content": "hi"}], "store": True}
            made = await http.post("/v1/chat/completions", json=body, headers=_as("mine"))
            one = f"/v1/chat/completions/{made.json()['id']}"

            async def ask(key: str, method: str, path: str, json: Any = None) -> httpx.Response:
                return await http.request(method, path, json=json, headers=_as(key))

            for method, path, json in (
                ("GET", one, None),
                ("GET", f"{one}/messages", None),
                ("POST", one, {"metadata": {"a": "b"}}),
                ("DELETE", one, None),
            ):
                assert (await ask("yours", method, path, json)).status_code == 404
            assert (await ask("yours", "GET", "/v1/chat/completions")).json()["data"] == []
            listed = (await ask("mine", "GET", "/v1/chat/completions")).json()["data"]
            assert [chat["id"] for chat in listed] == [made.json()["id"]]
            assert not any("metadata" in chat for chat in listed)
            assert (await ask("mine", "DELETE", one)).status_code == 200

    run(go())
