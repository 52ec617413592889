"""No JSON body sent to `/v1/responses` or `/v1/messages` causes a server error, and all errors have
the API's shape."""

from __future__ import annotations

from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.server.apis.anthropic import protocol
from quire.server.apis.anthropic.protocol import MessagesRequest
from quire.server.apis.responses import items
from quire.server.apis.responses.protocol import CreateRequest
from tests.server.inprocess import connect, run
from tests.server.scripted import scripted_engine
from tests.server.test_fuzz import VALUES
from tests.slow import examples

ENGINE = scripted_engine("one", " two")
SMALL = settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
KEYS = st.sampled_from(["a", "b"])


def some(kinds: Any) -> st.SearchStrategy[Any]:
    """Objects with valid field names, and values of random types."""
    shapes = [
        st.fixed_dictionaries(
            {"type": st.just(kind)},
            optional={
                name: st.one_of(VALUES, KEYS, st.just([{"type": "text", "text": "x"}]))
                for name in (*model.model_fields, "nonsense")
                if name != "type"
            },
        )
        for kind, model in kinds.items()
    ]
    return st.one_of(VALUES, *shapes)


ITEMS = some(items._KINDS)
BLOCKS = some(protocol._KINDS)
TOOLS = st.fixed_dictionaries(
    {"name": st.one_of(KEYS, VALUES)},
    optional={
        "type": st.sampled_from(["function", "custom", "web_search"]),
        "parameters": VALUES,
        "input_schema": VALUES,
        "strict": VALUES,
    },
)
ROLES = st.one_of(st.sampled_from(["user", "assistant", "system"]), VALUES)
TURNS = st.fixed_dictionaries(
    {"role": ROLES, "content": st.one_of(st.text(), st.lists(BLOCKS, max_size=3), VALUES)}
)


def bodies(model: Any, **special: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    fields = {name: VALUES for name in (*model.model_fields, "nonsense") if name != "stream"}
    return st.fixed_dictionaries(
        {}, optional={**fields, **special, "stream": st.booleans(), "model": st.just("scripted")}
    )


async def post(path: str, body: Any) -> httpx.Response:
    async with connect(ENGINE) as http:
        return await http.post(path, json=body)


@given(
    body=bodies(
        CreateRequest,
        input=st.one_of(st.text(), st.lists(st.one_of(ITEMS, TURNS), max_size=4)),
        tools=st.lists(TOOLS, max_size=3),
    ),
    path=st.sampled_from(["/v1/responses", "/v1/responses/input_tokens"]),
)
@SMALL
def test_responses(body: Any, path: str) -> None:
    answer = run(post(path, body))
    assert answer.status_code < 500, (body, answer.text)
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@given(
    body=bodies(
        MessagesRequest,
        messages=st.lists(TURNS, max_size=4),
        tools=st.lists(TOOLS, max_size=3),
        max_tokens=st.one_of(st.just(50), VALUES),
    ),
    path=st.sampled_from(["/v1/messages", "/v1/messages/count_tokens"]),
)
@SMALL
def test_messages(body: Any, path: str) -> None:
    answer = run(post(path, body))
    assert answer.status_code < 500, (body, answer.text)
    if answer.status_code != 200:
        assert set(answer.json()) == {"type", "error", "request_id"}
        assert set(answer.json()["error"]) == {"type", "message"}
