"""Structural tags: text in which tags, once begun, hold documents of their schemas."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from quire.errors import RequestError
from quire.grammar.lark import Rules
from quire.sampling_params import StructuredOutputsParams
from quire.server.errors import rename_fields
from quire.server.http.strict_model import StrictModel

MAX_STRUCTURES = 256
MAX_TRIGGERS = 64

Marker = Annotated[str, Field(max_length=1024)]


class Structure(StrictModel):
    """A tag: the text that begins it, the schema of its content, and the text that ends it."""

    begin: Annotated[str, Field(min_length=1, max_length=1024)]
    json_schema: dict[str, Any] | bool = Field(alias="schema")
    end: Marker


def structural_grammar(
    structures: Sequence[Structure], triggers: Sequence[str], added: Mapping[str, int]
) -> str:
    """Returns a grammar of any text in which each trigger begins one of the tags.

    Args:
        added: tokens outside the ordinary vocabulary, by their texts.

    Raises:
        RequestError: a tag begins with none of the triggers, or a trigger begins no tag.
    """
    rules = Rules(added)
    rests: dict[str, list[str]] = {trigger: [] for trigger in triggers}
    for place, tag in enumerate(structures):
        trigger = next((each for each in triggers if tag.begin.startswith(each)), None)
        if trigger is None:
            raise RequestError(
                f"'structures[{place}].begin' begins with none of 'triggers'.",
                param=f"structures[{place}].begin",
                code="invalid_value",
            )
        document = rules.schema(tag.json_schema)
        begin, end = rules.literal(tag.begin[len(trigger) :]), rules.literal(tag.end)
        rests[trigger].append(rules.add(f"{begin} {document} {end}"))
    rules.lines.append("TEXT: /(?s:.*)/")
    tags = []
    for place, (trigger, choices) in enumerate(rests.items()):
        if not choices:
            raise RequestError(
                f"'triggers[{place}]' begins none of 'structures'.",
                param=f"triggers[{place}]",
                code="invalid_value",
            )
        begun = f"TEXT {rules.literal(trigger)}"
        if trigger not in added:
            # Lazy: the text ends where the trigger first stands in it.
            rules.lines.append(f"trigger_{place}[lazy]: {begun}")
            begun = f"trigger_{place}"
        tags.append(rules.add(f"{begun} ({' | '.join(choices)})"))
    return rules.grammar(f"({' | '.join(tags)})* tail") + "tail: TEXT\n"


# Structured outputs in request bodies: OpenAI's `response_format`, vLLM's `guided_*` and
# `structured_outputs`.

MAX_CHOICES = 10_000

Schema = dict[str, Any] | bool
Trigger = Annotated[str, Field(min_length=1, max_length=1024)]
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]


class JsonSchema(StrictModel):
    """OpenAI's JSON schema. It is always enforced to the letter, `strict` or not.

    `name`, which may be left out, and `description` are labels; the model sees neither them nor the
    schema.
    """

    name: Annotated[str, Field(max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")] | None = None
    description: Annotated[str, Field(max_length=4096)] | None = None
    json_schema: Schema = Field(alias="schema")
    strict: bool | None = None


_FIELDS = {
    "json_schema": ("json_schema",),
    "structures": ("structural_tag",),
    "triggers": ("structural_tag",),
}
"""Fields of formats, with the types that have and need them."""


class ResponseFormat(StrictModel):
    """OpenAI's `response_format`, with llama.cpp's `schema` of a JSON object and vLLM's structural
    tags."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    object_schema: Schema | None = Field(None, alias="schema")
    structures: (
        Annotated[list[Structure], Field(min_length=1, max_length=MAX_STRUCTURES, fail_fast=True)]
        | None
    ) = None
    triggers: (
        Annotated[list[Trigger], Field(min_length=1, max_length=MAX_TRIGGERS, fail_fast=True)]
        | None
    ) = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        for name, kinds in _FIELDS.items():
            value = getattr(self, name)
            if (self.type in kinds) != (value is not None):
                need = "needs" if value is None else "has no"
                raise RequestError(
                    f"a format of type {self.type!r} {need} {name!r}.",
                    param=name,
                    code="missing_required_parameter" if value is None else "invalid_value",
                )
        if self.object_schema is not None and self.type != "json_object":
            raise RequestError(
                f"a format of type {self.type!r} has no 'schema'.",
                param="schema",
                code="invalid_value",
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


def structured_outputs(
    body: StructuredFields, added: Mapping[str, int] | None = None
) -> StructuredOutputsParams | None:
    """Returns the structured outputs that a body asks for.

    Args:
        added: the tokenizer's added tokens, which structural tags may name.

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
            if kind == "structural_tag":
                with _within(field):
                    tags = structural_grammar(value.structures, value.triggers, added or {})
                return StructuredOutputsParams(grammar=tags)
            return StructuredOutputsParams(**{kind: value})
    return None


@contextlib.contextmanager
def _within(field: str) -> Iterator[None]:
    """Puts the name of a field before those that errors name."""
    try:
        yield
    except RequestError as error:
        raise RequestError(str(error), f"{field}.{error.param}", error.code) from None


def structured_field(body: StructuredFields) -> str:
    """Returns the field that asks for structured outputs, for later errors."""
    return next(iter(_asked(body)), "structured_outputs")


def _asked(body: StructuredFields) -> dict[str, tuple[str, Any]]:
    """Maps the fields that ask for structured outputs to their kind and value."""
    asked: dict[str, tuple[str, Any]] = {}
    format = body.response_format
    if format is not None and format.json_schema is not None:
        asked["response_format.json_schema.schema"] = "json", format.json_schema.json_schema
    elif format is not None and format.object_schema is not None:
        asked["response_format.schema"] = "json", format.object_schema
    elif format is not None and format.type == "json_object":
        asked["response_format"] = "json_object", True
    elif format is not None and format.type == "structural_tag":
        asked["response_format"] = "structural_tag", format
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
