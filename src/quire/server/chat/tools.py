"""Checks a dialogue's tools, and builds the grammar that enforces their calls."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from msgspec.structs import replace

from quire.errors import GrammarError
from quire.grammar.bounded import resolve
from quire.grammar.grammar import as_lark
from quire.grammar.json_schema import enforceable
from quire.grammar.keywords import ANNOTATIONS
from quire.grammar.lark import Rules
from quire.sampling_params import SamplingParams, StructuredOutputsParams
from quire.server.chat.dialogue import Dialogue
from quire.server.errors import ApiError
from quire.server.parsers.chat_format import ChatFormat
from quire.server.parsers.stream import ToolParser

# Keywords of the arguments' schema that are enforced in formats that write each argument by itself.
_PROPERTY_KEYWORDS = ANNOTATIONS | {
    "type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema",
}  # fmt: skip
# Keywords of a string's schema that are enforced in formats that write strings without quotes.
_STRING_KEYWORDS = ANNOTATIONS | {"type", "enum", "const"}
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_MOST_STEPS = 16
"""Most references (`$ref`) to follow one after the other."""


def check_tools(dialogue: Dialogue, format: ChatFormat) -> None:
    """Checks the tools and the choice of tools.

    Raises:
        ApiError: 400, naming the field.
    """
    names: set[str] = set()
    for place, tool in enumerate(dialogue.tools):
        name = tool["function"]["name"]
        param = f"tools[{place}].function"
        if not _NAME.fullmatch(name):
            raise _invalid(
                f"{param}.name",
                f"{name[:100]!r} is not made of 1 to 128 letters, digits, underscores, dashes and "
                "dots.",
            )
        if name in names:
            raise _invalid(f"{param}.name", f"there are two tools with the name {name!r}.")
        names.add(name)
        schema = parameters_of(tool)
        if schema["type"] != "object" or not isinstance(schema.get("properties", {}), dict):
            raise _invalid(
                f"{param}.parameters", "it must be a schema of type 'object', with 'properties'."
            )
    choice = dialogue.tool_choice
    unknown = sorted(set(choice.names or ()) - names)
    if unknown:
        raise _invalid("tool_choice", f"there is no tool with the name {unknown[0][:100]!r}.")
    if choice.mode == "required" and not names:
        raise _invalid("tool_choice", "there are no 'tools' to choose from.")
    if names and choice.mode != "none" and format.tool_parser is None:
        why = format.error or (
            "the format in which this model calls tools is not known. Start the server with "
            "--tool-call-parser."
        )
        raise ApiError(
            400,
            f"'tools' cannot be used: {why}",
            param="tools",
            code="unsupported_parameter",
        )


def _invalid(param: str, why: str) -> ApiError:
    return ApiError(400, f"Invalid value for '{param}': {why}", param=param, code="invalid_value")


def parameters_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of the tool's arguments.

    A tool without a schema takes no arguments, as in OpenAI's API. If the schema is a reference
    (`$ref`), its target is merged into it, so that `properties` is at the root.
    """
    parameters = tool["function"].get("parameters")
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    schema = {"type": "object", **parameters}
    for _ in range(_MOST_STEPS):
        reference = schema.get("$ref")
        target = resolve(schema, unquote(reference)) if isinstance(reference, str) else None
        rest = {name: value for name, value in schema.items() if name != "$ref"}
        if not isinstance(target, Mapping) or any(
            rest[name] != target[name] for name in rest.keys() & target.keys() - ANNOTATIONS
        ):
            break
        schema = {**rest, **target}
    return schema


def callable_tools(dialogue: Dialogue) -> dict[str, dict[str, Any]]:
    """Maps the names of the tools that the model may call to the schemas of their arguments."""
    choice = dialogue.tool_choice
    if choice.mode == "none":
        return {}
    schemas = {tool["function"]["name"]: parameters_of(tool) for tool in dialogue.tools}
    return {
        name: schema
        for name, schema in schemas.items()
        if choice.names is None or name in choice.names
    }


def one_call(dialogue: Dialogue) -> bool:
    """Tells whether the answer may have one call at most."""
    choice = dialogue.tool_choice
    return not dialogue.parallel_tool_calls or (
        choice.mode == "required" and choice.names is not None and len(choice.names) == 1
    )


def constrain_params(
    dialogue: Dialogue, format: ChatFormat, added: Mapping[str, int], begins_open: bool | None
) -> SamplingParams:
    """Returns the dialogue's sampling parameters, with a grammar if it needs one.

    It needs one in three cases: a tool must be called; a strict tool may be called; structured
    outputs are combined with tools or with reasoning.

    Args:
        added: the tokenizer's added tokens, by their text.
        begins_open: see `ReasoningFormat.begins_open`.

    Raises:
        ApiError: 400, a tool's schema cannot be enforced.
    """
    params, outputs = dialogue.params, dialogue.params.structured_outputs
    tools, required = callable_tools(dialogue), dialogue.tool_choice.mode == "required"
    strict = {t["function"]["name"] for t in dialogue.tools if t["function"].get("strict")}
    reasons = format.reasoning is not None and begins_open is not False
    calls = bool(tools) and (required or outputs is not None or bool(strict & tools.keys()))
    if not calls and not (outputs is not None and reasons):
        return params
    rules = Rules(added, format.template)
    answer = rules.literal(format.reasoning.answer) if format.reasoning and reasons else ""
    if format.tool_parser is not None and format.tool_parser.answer:
        answer = rules.literal(format.tool_parser.answer)
    body = f"{answer} ({_output_rule(rules, outputs)})" if outputs is not None else ""
    if calls and format.tool_parser is not None:
        parser = format.tool_parser
        schemas = _schemas(dialogue, tools, parser)
        try:
            call = rules.add(parser.grammar(rules, schemas, parallel=not one_call(dialogue)))
        except GrammarError as error:
            raise ApiError(
                400, f"Invalid value for 'tools': {error}", param="tools", code=error.code
            ) from None
        if required:
            body = call
        elif outputs is not None:
            body = f"{body} | {call}"
        else:
            # If the format also marks text, no first character has to be kept for calls.
            first = "" if parser.marks_text else parser.first_chars
            body = rules.optional_call(
                call, parser.starts, first, answer, must_answer=bool(parser.answer)
            )
    if reasons and format.reasoning is not None:
        turn = rules.literal(format.reasoning.turn)
        block = f"{rules.add_until(format.reasoning.close)} {turn} /\\s{{0,4}}/"
        if begins_open is None:
            block = f"({rules.literal(format.reasoning.open)} {block})?"
        body = f"{block} ({body})"
    return replace(params, structured_outputs=StructuredOutputsParams(grammar=rules.grammar(body)))


def _schemas(
    dialogue: Dialogue, tools: Mapping[str, dict[str, Any]], parser: type[ToolParser]
) -> dict[str, dict[str, Any]]:
    """Returns the schemas to enforce, by the tools' names.

    Keywords that cannot be enforced are ignored for tools that are not strict.

    Raises:
        ApiError: 400, a strict tool's schema has a keyword that cannot be enforced.
    """
    schemas = {}
    for place, tool in enumerate(dialogue.tools):
        name = tool["function"]["name"]
        if name not in tools:
            continue
        strict = bool(tool["function"].get("strict"))
        schema = tools[name] if strict else _lenient_schema(tools[name])
        param = f"tools[{place}].function.parameters"
        try:
            enforceable(schema)
        except GrammarError as error:
            raise ApiError(
                400, f"Invalid value for '{param}': {error}", param=param, code=error.code
            ) from None
        if strict:
            _check_format(schema, parser, param)
        schemas[name] = schema
    return schemas


def _check_format(schema: Mapping[str, Any], parser: type[ToolParser], param: str) -> None:
    """Checks that the format of the calls can enforce all keywords of a schema.

    Raises:
        ApiError: 400, naming the first keyword that it cannot enforce.
    """
    pointers = sorted(schema.keys() - _PROPERTY_KEYWORDS) if parser.by_property else []
    if parser.bare_strings:
        for name, inner in schema.get("properties", {}).items():
            if isinstance(inner, Mapping) and inner.get("type") == "string":
                pointers += [
                    f"properties/{name}/{key}" for key in sorted(inner.keys() - _STRING_KEYWORDS)
                ]
    if pointers:
        raise _invalid(
            param,
            f"'#/{pointers[0][:200]}' cannot be enforced in the format in which this model calls "
            "tools.",
        )


def _lenient_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema with llguidance's option to ignore keywords that it does not know."""
    options = schema.get("x-guidance")
    own = options if isinstance(options, dict) else {}
    return {**schema, "x-guidance": {**own, "lenient": True}}


def _output_rule(rules: Rules, outputs: StructuredOutputsParams | None) -> str:
    """Returns the grammar's rule for the structured outputs."""
    if outputs is None:
        return ""
    if outputs.json is not None:
        return rules.add(f"%json {outputs.json}")
    if outputs.json_object:
        return rules.add('%json {"type": "object"}')
    if outputs.regex is not None:
        return rules.regex(outputs.regex)
    if outputs.grammar is not None:
        return rules.add(f"%lark {{\n{as_lark(outputs.grammar)}\n}}")
    return rules.texts(outputs.choice)
