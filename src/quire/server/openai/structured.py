"""Structured outputs in request bodies: OpenAI's `response_format`, vLLM's `guided_*` and
`structured_outputs`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from quire.errors import RequestError
from quire.sampling_params import StructuredOutputsParams
from quire.server.errors import rename_fields
from quire.server.strict_model import StrictModel

MAX_CHOICES = 10_000

Schema = dict[str, Any] | bool
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]


class JsonSchema(StrictModel):
    """OpenAI's JSON schema. It is always enforced to the letter, `strict` or not.

    `name` and `description` are labels; the model sees neither them nor the schema.
    """

    name: Annotated[str, Field(max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")]
    description: Annotated[str, Field(max_length=4096)] | None = None
    json_schema: Schema = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            need = "needs" if self.json_schema is None else "has no"
            raise RequestError(
                f"a format of type {self.type!r} {need} 'json_schema'.",
                param="json_schema",
                code="missing_required_parameter" if self.json_schema is None else "invalid_value",
            )
        return self


class StructuredOutputs(StrictModel):
    """vLLM's structured outputs: exactly one of the fields."""

    json_schema: Schema | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


class StructuredFields(StrictModel):
    """Fields of structured outputs, which all generating routes take."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None


def structured_outputs(body: StructuredFields) -> StructuredOutputsParams | None:
    """Returns the structured outputs that a body asks for.

    Raises:
        RequestError: the body asks for more than one; names the field.
    """
    found = _asked(body)
    if len(found) > 1:
        first, second = list(found)[:2]
        raise RequestError(
            f"'{second}' and '{first}' exclude each other.", param=second, code="invalid_value"
        )
    for field, (kind, value) in found.items():
        with rename_fields({"structured_outputs": field}):
            if kind == "json" and not isinstance(value, str):
                value = json.dumps(value)
            return StructuredOutputsParams(**{kind: value})
    return None


def structured_field(body: StructuredFields) -> str:
    """Returns the field that asks for structured outputs, for later errors."""
    return next(iter(_asked(body)), "structured_outputs")


def _asked(body: StructuredFields) -> dict[str, tuple[str, Any]]:
    """Maps the fields that ask for structured outputs to their kind and value."""
    asked: dict[str, tuple[str, Any]] = {}
    format = body.response_format
    if format is not None and format.json_schema is not None:
        asked["response_format.json_schema.schema"] = "json", format.json_schema.json_schema
    elif format is not None and format.type == "json_object":
        asked["response_format"] = "json_object", True
    for kind in ("json", "regex", "choice", "grammar"):
        value = getattr(body, f"guided_{kind}")
        if value is not None:
            asked[f"guided_{kind}"] = kind, value
    if body.structured_outputs is not None:
        given = {
            kind: value
            for kind, value in body.structured_outputs.model_dump(by_alias=True).items()
            if value is not None and value is not False
        }
        if "json" not in given and body.structured_outputs.json_schema is False:
            given["json"] = False
        asked.update({f"structured_outputs.{kind}": (kind, v) for kind, v in given.items()})
        if not given:
            raise RequestError(
                "'structured_outputs' needs one of json, json_object, regex, choice and grammar.",
                param="structured_outputs",
                code="invalid_value",
            )
    return asked
