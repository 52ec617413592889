"""Structured output over HTTP, with the `openai` client and a real server, and every refused
field."""

from __future__ import annotations

import json
import time
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.server.fakes import FakeClient
from tests.server.inprocess import PROMPT, assert_error, post
from tests.server.server_process import MODEL

HELLO: list[Any] = [{"role": "user", "content": "Tell me of a pet."}]
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


class Pet(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["cat", "dog"]
    name: str = Field(pattern="^[A-Z][a-z]{1,9}$")
    age: int = Field(ge=0, le=30)
    friends: list[Literal["fox", "owl"]] = Field(max_length=2)


SCHEMA = Pet.model_json_schema()


def chat(client: openai.OpenAI, max_tokens: int = 200, **options: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=max_tokens, **options
    )


def named(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "pet", "schema": schema, **more}}


def test_parse(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=HELLO, max_tokens=200, response_format=Pet
    )
    pet = answer.choices[0].message.parsed
    assert answer.choices[0].finish_reason == "stop"
    assert pet is not None
    assert pet.kind in ("cat", "dog")


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"background": True}])
def test_a_schema_that_cannot_be_enforced_is_a_400(
    client: openai.OpenAI, more: dict[str, Any]
) -> None:
    """Before the first event, and before a background response exists. Another request is well."""
    # Only the compiler sees that no string matches both.
    empty = {"type": "string", "pattern": "^a$", "allOf": [{"pattern": "^b$"}]}
    bad = {"type": "json_schema", "name": "pet", "schema": empty}
    with pytest.raises(openai.BadRequestError, match="cannot be enforced") as caught:
        client.responses.create(model=MODEL, input="hi", text={"format": bad}, **more)
    assert (caught.value.param, caught.value.code) == ("text.format.schema", "invalid_grammar")
    if not more.get("background"):
        with pytest.raises(openai.BadRequestError, match="cannot be enforced") as caught:
            chat(client, response_format=named(empty), **more)
        assert caught.value.param == "response_format.json_schema.schema"
    good = {**bad, "schema": SCHEMA}
    answer = client.responses.create(model=MODEL, input="hi", text={"format": good}, **more)
    if more.get("background"):
        while (answer := client.responses.retrieve(answer.id)).status in ("queued", "in_progress"):
            time.sleep(0.01)
        assert answer.status in ("completed", "incomplete")
    elif not more:
        assert Pet.model_validate_json(answer.output_text)


def test_streamed_parse(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=HELLO, max_tokens=200, response_format=Pet, seed=3
    ) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion()
    whole = client.chat.completions.parse(
        model=MODEL, messages=HELLO, max_tokens=200, response_format=Pet, seed=3
    )
    assert streamed.choices[0].message.parsed == whole.choices[0].message.parsed


def test_n_and_non_strict(client: openai.OpenAI) -> None:
    answer = chat(client, n=3, response_format=named(SCHEMA, strict=False, description="A pet."))
    pets = [Pet.model_validate_json(choice.message.content) for choice in answer.choices]
    assert len(pets) == 3


def test_a_schema_without_a_name(client: openai.OpenAI) -> None:
    format: Any = {"type": "json_schema", "schema": {"enum": ["one", "two"]}}
    nested: Any = {"type": "json_schema", "json_schema": {"schema": format["schema"]}}
    assert json.loads(chat(client, response_format=nested).choices[0].message.content) in (
        "one", "two"
    )  # fmt: skip
    answer = client.responses.create(model=MODEL, input="Hello!", text={"format": format})
    assert json.loads(answer.output_text) in ("one", "two")


def test_json_object_and_text(client: openai.OpenAI) -> None:
    answer = chat(client, 24, response_format={"type": "json_object"}, seed=1)
    assert answer.choices[0].message.content.startswith("{")
    assert chat(client, 24, response_format={"type": "text"}).choices[0].message.content


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_json", {"enum": ["one", "two"]}),
        ("guided_json", '{"enum": ["one", "two"]}'),
        ("guided_choice", ['"one"', '"two"']),
        ("guided_regex", '"(one|two)"'),
        ("guided_grammar", 'start: "\\"" WORD "\\""\nWORD: "one" | "two"'),
        ("structured_outputs", {"json": {"enum": ["one", "two"]}}),
        ("structured_outputs", {"choice": ['"one"', '"two"']}),
        ("structured_outputs", {"regex": '"(one|two)"'}),
        ("structured_outputs", {"grammar": 'root ::= "\\"one\\"" | "\\"two\\""'}),
        ("response_format", named({"enum": ["one", "two"]})),
    ],
)
def test_every_field_on_both_routes(client: openai.OpenAI, field: str, value: Any) -> None:
    answer = chat(client, extra_body={field: value})
    assert answer.choices[0].message.content in ('"one"', '"two"')
    answer = client.completions.create(
        model=MODEL, prompt="Count:", max_tokens=60, extra_body={field: value}
    )
    assert answer.choices[0].text in ('"one"', '"two"')


def test_with_log_probabilities_and_stops(client: openai.OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=2, extra_body={"guided_regex": "[0-9]{3}"})
    assert len(answer.choices[0].message.content) == 3
    assert answer.choices[0].logprobs.content
    cut = chat(client, stop="b", extra_body={"guided_regex": "a{5}bc"})
    assert cut.choices[0].message.content == "aaaaa"


def test_refused_by_the_server(client: openai.OpenAI) -> None:
    bad = {"type": "object", "properties": {"a": {"if": {}}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client, response_format=named(bad), stream=stream)
        error = caught.value
        assert error.param == "response_format.json_schema.schema"
        assert error.code == "unsupported_schema"
        assert "#/properties/a/if" in str(error)
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, extra_body={"guided_regex": "(a"})
    assert caught.value.param == "guided_regex"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(
            model=MODEL, prompt="a", extra_body={"structured_outputs": {"grammar": "start: x"}}
        )
    assert caught.value.param == "structured_outputs.grammar"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        ({"response_format": {}}, "response_format.type", "missing_required_parameter"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema",
         "missing_required_parameter"),
        ({"response_format": {"type": "text", "json_schema": {"name": "a", "schema": {}}}},
         "response_format.json_schema", "invalid_value"),
        ({"response_format": named({}, other=1)}, "response_format.json_schema.other",
         "unknown_parameter"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
         "response_format.json_schema.name", "invalid_value"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
         "response_format.json_schema.schema", "missing_required_parameter"),
        ({"response_format": named([])}, None, "invalid_value"),
        ({"response_format": named({"if": {}})}, "response_format.json_schema.schema",
         "unsupported_schema"),
        ({"response_format": named({"type": "strnig"})}, "response_format.json_schema.schema",
         "invalid_schema"),
        ({"guided_json": "{"}, "guided_json", "invalid_json"),
        ({"guided_json": {"enum": ["x" * 600_000]}}, "guided_json", "grammar_too_large"),
        ({"guided_regex": "a" * 70_000}, "guided_regex", "grammar_too_large"),
        ({"guided_choice": []}, "guided_choice", "invalid_value"),
        ({"guided_choice": [1]}, "guided_choice[0]", "invalid_value"),
        ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag",
         "unknown_parameter"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice",
         "invalid_value"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "structured_outputs.regex",
         "invalid_value"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice",
         "invalid_value"),
    ],
)  # fmt: skip
def test_bad_requests(path: str, fields: dict[str, Any], param: str | None, code: str) -> None:
    from tests.server.test_validation import PlainTokenizer

    client = FakeClient(tokenizer=PlainTokenizer())
    response = post(path, {**(CHAT if "chat" in path else PROMPT), **fields}, client)
    if param is None:
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith("response_format.json_schema.schema")
    else:
        assert_error(response, 400, param, code)
    assert client.seen == []


def test_null_and_text_formats_set_no_structure() -> None:
    fields = {"response_format": {"type": "text"}, "guided_json": None, "structured_outputs": None}
    client = FakeClient()
    assert post("/v1/completions", {**PROMPT, **fields}, client).status_code == 200
    assert client.seen[0][1].structured_outputs is None


def test_a_schema_keeps_the_order_of_its_properties() -> None:
    client = FakeClient()
    schema = {"type": "object", "properties": {"z": {}, "a": {}}}
    assert post("/v1/completions", {**PROMPT, "guided_json": schema}, client).status_code == 200
    assert json.loads(client.seen[0][1].structured_outputs.json) == schema
    assert list(json.loads(client.seen[0][1].structured_outputs.json)["properties"]) == ["z", "a"]


def test_json_objects_with_a_schema(client: openai.OpenAI) -> None:
    answer = chat(client, response_format={"type": "json_object", "schema": SCHEMA})
    assert Pet.model_validate_json(answer.choices[0].message.content)


def test_structural_tags(client: openai.OpenAI) -> None:
    tags = {
        "type": "structural_tag",
        "structures": [{"begin": "a", "schema": {"enum": ["cat"]}, "end": "!"}],
        "triggers": ["a"],
    }
    answer = chat(client, response_format=tags, seed=2, temperature=2.0, n=8)
    texts = [choice.message.content.split("a", 1) for choice in answer.choices]
    assert any(len(text) == 2 for text in texts)
    assert all(rest.startswith('"cat"!') for _, *rests in texts for rest in rests)
    wrong = {**tags, "triggers": ["b"]}
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, response_format=wrong)
    assert caught.value.param == "response_format.structures[0].begin"


@pytest.mark.parametrize(
    ("format", "param", "code"),
    [
        ({"type": "text", "schema": {}}, "response_format.schema", "invalid_value"),
        ({"type": "structural_tag", "triggers": ["a"]}, "response_format.structures",
         "missing_required_parameter"),
        ({"type": "json_object", "triggers": ["a"]}, "response_format.triggers", "invalid_value"),
        ({"type": "structural_tag", "format": {}}, "response_format.format", "unknown_parameter"),
    ],
)  # fmt: skip
def test_formats_that_do_not_fit(format: dict[str, Any], param: str, code: str) -> None:
    assert_error(post("/v1/completions", {**PROMPT, "response_format": format}), 400, param, code)
