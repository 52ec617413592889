"""No JSON body causes a server error."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.server.apis.openai.protocol import ChatRequest, CompletionRequest
from tests.server.fakes import FakeClient, PlainTokenizer
from tests.server.inprocess import connect, run
from tests.slow import examples

FIELDS = sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields, "tools", "nonsense"})
NUMBERS = st.one_of(
    st.integers(),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**400, -(10**400)]),
    st.floats(allow_nan=False, allow_infinity=False),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=20)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5)


@given(body=BODIES, valid=st.booleans())
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
def test_no_body_is_a_server_error(body: dict[str, Any], valid: bool) -> None:
    async def go() -> list[httpx.Response]:
        client = FakeClient(tokenizer=PlainTokenizer())
        async with connect(client) as http:
            needed: dict[str, Any] = {"prompt": "x"} if valid else {}
            chat = {"messages": [{"role": "user", "content": "x"}]} if valid else {}
            return [
                await http.post("/v1/completions", json={**needed, **body}),
                await http.post("/v1/chat/completions", json={**chat, **body}),
                await http.post("/generate", json={**needed, **body}),
            ]

    for response in run(go()):
        assert response.status_code < 500, (body, response.text)


@given(st.binary(max_size=200))
@settings(max_examples=examples(60))
def test_no_bytes_are_a_server_error(content: bytes) -> None:
    async def go() -> httpx.Response:
        async with connect(FakeClient()) as http:
            headers = {"content-type": "application/json"}
            return await http.post("/v1/completions", content=content, headers=headers)

    assert 400 <= asyncio.run(go()).status_code < 500
