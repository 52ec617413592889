"""Requests for a pydantic model, as LangChain and instructor send them."""

from __future__ import annotations

import json
from datetime import date
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import llguidance
import pytest
from pydantic import BaseModel, Field

import quire
from quire.grammar.grammar import compilable
from quire.text.tokenizer import Tokenizer
from tests.server.fakes import FakeClient
from tests.server.inprocess import post

EMBEDDED = Path(quire.__file__).parent / "embedded" / "quire-tiny"


class Kind(Enum):
    cat = "cat"
    dog = "dog"


class Owner(BaseModel):
    street: str
    zip: int | None = Field(None, ge=0, le=99999)


class Pet(BaseModel):
    """A pet."""

    name: str = Field(description="Its name.", max_length=20)
    age: int = Field(ge=0)
    weight: float | None = None
    tags: list[str] = Field(default_factory=list, max_length=3)
    kind: Kind
    color: Literal["red", "blue"] | None = None
    since: date
    owner: Owner


def strict(schema: Any) -> Any:
    """The schema in the strict form of OpenAI's client: no further properties, all required, no
    defaults."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(value) for name, value in schema.items() if name != "default"}
    if made.get("type") == "object":
        made |= {"additionalProperties": False, "required": list(made["properties"])}
    return made


SCHEMA = Pet.model_json_schema()
DOCUMENT = (
    '{"name": "Ann", "age": 3, "weight": 1.5, "tags": ["a"], "kind": "cat", "color": null, '
    '"since": "2020-02-29", "owner": {"street": "x", "zip": null}}'
)
WRONG = (
    DOCUMENT.replace('"cat"', '"cow"'),
    DOCUMENT.replace("02-29", "02-30"),
    DOCUMENT.replace(": null}", ': null, "x": 1}'),
    DOCUMENT.replace('"age": 3', '"age": -3'),
)
CALL = '<tool_call>\n{"name": "Pet", "arguments": %s}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "Pet"}}
ASK = {"messages": [{"role": "user", "content": "Tell me of a pet."}]}


def tool(schema: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "Pet", "description": "A pet.", "parameters": schema, **more}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": NAMED}


def format(schema: Any, **more: Any) -> dict[str, Any]:
    named = {"name": "Pet", "schema": schema, **more}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


RESPONSES_TOOL = {"type": "function", "name": "Pet", "parameters": strict(SCHEMA), "strict": True}
SHAPES: dict[str, tuple[str, dict[str, Any], str]] = {
    "langchain function_calling": (
        "chat/completions",
        {**ASK, **tool(SCHEMA), "parallel_tool_calls": False, "stream": False},
        CALL,
    ),
    "langchain function_calling, strict": (
        "chat/completions",
        {**ASK, **tool(strict(SCHEMA), strict=True), "parallel_tool_calls": False},
        CALL,
    ),
    "langchain json_schema": ("chat/completions", {**ASK, **format(strict(SCHEMA))}, "%s"),
    "instructor TOOLS": ("chat/completions", {**ASK, **tool(SCHEMA)}, CALL),
    "instructor TOOLS_STRICT": (
        "chat/completions",
        {**ASK, **tool(strict(SCHEMA), strict=True)},
        CALL,
    ),
    "instructor JSON_SCHEMA": ("chat/completions", {**ASK, **format(SCHEMA)}, "%s"),
    "instructor JSON_O1": ("chat/completions", {**ASK, **format(SCHEMA, strict=True)}, "%s"),
    "instructor RESPONSES_TOOLS": (
        "responses",
        {
            "input": [{"role": "user", "content": "Tell me of a pet."}],
            "tools": [RESPONSES_TOOL],
            "tool_choice": {"type": "function", "name": "Pet"},
            "text": {
                "format": {
                    "type": "json_schema", "name": "Pet", "strict": True, "schema": strict(SCHEMA)
                }
            },
        },
        CALL,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_path(EMBEDDED)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(tokenizer.hub.to_str())


@pytest.mark.parametrize("name", SHAPES)
def test_schemas_in_every_clients_shape_are_enforced(
    name: str, tokenizer: Tokenizer, vocabulary: llguidance.LLTokenizer
) -> None:
    path, body, shape = SHAPES[name]
    client = FakeClient(tokenizer=tokenizer)
    client.config.scheduler.max_model_len = 4096
    answer = post(f"/v1/{path}", body, client)
    assert answer.status_code == 200, answer.text
    params = client.seen[0][1].structured_outputs
    assert params is not None

    def accepted(document: str) -> bool:
        matcher = llguidance.LLMatcher(vocabulary, compilable(params))
        ids = tokenizer.encode(shape % document, add_special_tokens=False).tolist()
        return bool(matcher.consume_tokens(ids) and matcher.is_accepting())

    assert json.loads(DOCUMENT)
    assert accepted(DOCUMENT)
    assert not any(accepted(document) for document in WRONG)
