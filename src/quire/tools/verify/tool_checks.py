"""Checks of tool calls. Each was a bug of a server, which its issue tracker describes.

Most checks need no clever model. They force a call by `tool_choice`, and its arguments by a schema
with a single value. So the server's own grammar decides the text, and its parser must return it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from quire.tools.verify.outcome import FailedError, NotOfferedError, require, require_same
from quire.tools.verify.routes import Json
from quire.tools.verify.tool_session import CheckedCall, ToolAnswer, ToolSession

_AT_ONCE = 8
"""Requests that one check sends at the same time."""


@dataclass(frozen=True, slots=True)
class ToolCheck:
    """One check.

    Attributes:
        seen_in: issues and pull requests that describe the bug, as "project#number".
        run: returns what was compared. Raises FailedError or NotOfferedError.
    """

    name: str
    seen_in: tuple[str, ...]
    run: Callable[[ToolSession], str]


def _tool(name: str, properties: Json, required: list[str] | None = None, **more: Any) -> Json:
    needed = list(properties) if required is None else required
    schema = {"type": "object", "properties": properties, "required": needed}
    return {"name": name, "description": f"Calls {name}.", "parameters": schema, **more}


def _one_of(*values: Any) -> Json:
    return {"type": "string", "enum": list(values)}


WEATHER = _tool(
    "get_weather",
    {"city": _one_of("Oslo", "Rome"), "days": {"type": "integer", "enum": [1, 3]}},
    ["city"],
)
TIME = _tool("get_time", {"zone": _one_of("UTC", "CET")})
_ASK = "What will the weather be in Oslo? Call get_weather."


def _named(name: str) -> Json:
    return {"type": "function", "function": {"name": name}}


def _check_weather(call: CheckedCall) -> None:
    values = call.values
    require(call.name == "get_weather", f"{call.name!r} is called instead of 'get_weather'")
    fits = values.get("city") in ("Oslo", "Rome") and values.get("days", 1) in (1, 3)
    require(fits and values.keys() <= {"city", "days"}, f"the schema is broken by {values}")


# -- tool_choice -------------------------------------------------------------------------------


def required(session: ToolSession) -> str:
    body = session.body([WEATHER, TIME], _ASK, tool_choice="required", parallel_tool_calls=False)
    answers = session.both(body, "tool_choice")
    for answer in answers:
        answer.only_call().values  # noqa: B018 (raises for arguments that are not an object)
        reason = answer.finish_reason
        require(reason == "tool_calls", f"finish_reason is {reason!r} after a complete call")
    return _same(answers)


def named(session: ToolSession) -> str:
    body = session.body([WEATHER, TIME], "Hello.", tool_choice=_named("get_weather"))
    answers = session.both(body, "tool_choice")
    for answer in answers:
        _check_weather(answer.only_call())
        reason = answer.finish_reason
        require(reason in ("stop", "tool_calls"), f"finish_reason is {reason!r}")
    return _same(answers)


def none(session: ToolSession) -> str:
    answers = session.both(session.body([WEATHER], _ASK, tool_choice="none"), "tool_choice")
    for answer in answers:
        require(not answer.calls, "a tool is called with tool_choice='none'")
    return "no calls"


def automatic(session: ToolSession) -> str:
    answers = session.both(session.body([WEATHER, TIME], "Say hello in one word.", max_tokens=64))
    for answer in answers:
        for call in answer.calls if answer.finish_reason == "tool_calls" else ():
            call.values  # noqa: B018
    return _same(answers)


def one_at_a_time(session: ToolSession) -> str:
    body = session.body(
        [WEATHER, TIME],
        "Call get_weather for Oslo and for Rome, and get_time for UTC.",
        tool_choice="required",
        parallel_tool_calls=False,
    )
    for answer in session.both(body, "parallel_tool_calls"):
        require(len(answer.calls) == 1, f"there are {len(answer.calls)} calls, not one")
    return "1 call"


def several(session: ToolSession) -> str:
    body = session.body(
        [WEATHER, TIME],
        "Call get_weather for Oslo and for Rome, and get_time for UTC, all at once.",
        tool_choice="required",
        max_tokens=128,
    )
    answers = session.both(body, "tool_choice")
    for answer in answers:
        complete = answer.calls if answer.finish_reason == "tool_calls" else answer.calls[:-1]
        for call in complete:
            call.values  # noqa: B018
    return _same(answers)


def unknown_choice(session: ToolSession) -> str:
    bad = {
        "a tool_choice that names no tool": session.body(
            [WEATHER], _ASK, tool_choice=_named("nobody")
        ),
        "tool_choice='sometimes'": session.body([WEATHER], _ASK, tool_choice="sometimes"),
        "tool_choice='required' without tools": session.body([], _ASK, tool_choice="required"),
    }
    for name, body in bad.items():
        session.refused(body, name)
    session.ask(session.body([WEATHER], _ASK, max_tokens=1))
    return f"{len(bad)} refusals, then an answer"


# -- streams -----------------------------------------------------------------------------------


def _same(answers: list[ToolAnswer]) -> str:
    """Requires that the whole answer and the streamed one are equal."""
    whole, streamed = answers
    places = "the whole and the streamed answer"
    for name in ("content", "reasoning", "finish_reason"):
        require_same(name, getattr(whole, name), getattr(streamed, name), places)
    first, second = (
        [(call.name, call.arguments) for call in answer.calls] for answer in (whole, streamed)
    )
    require_same("calls", first, second, places)
    return f"{len(first)} calls, whole and streamed"


def streamed_in_pieces(session: ToolSession) -> str:
    text = " ".join(f"line {number} of a long file;" for number in range(12))
    tool = _tool("write_file", {"text": _one_of(text)})
    body = session.body([tool], f"Write this file: {text}", tool_choice=_named("write_file"))
    call = session.stream(body, "tool_choice").only_call()
    require_same("arguments", {"text": text}, call.values, "the schema and the call")
    require(call.pieces > 3, f"arguments of {len(text)} characters come in {call.pieces} pieces")
    return f"{call.pieces} pieces"


def truncated(session: ToolSession) -> str:
    """Cuts one call at several limits: it must never be reported as complete."""
    text = "one two three four five six seven eight nine ten eleven twelve"
    tool = _tool("note", {"text": _one_of(text)})
    cut = 0
    for limit in (1, 5, 9, 14, 20):
        field = session.session.limit
        body = session.body([tool], f"Note: {text}", tool_choice=_named("note"), **{field: limit})
        answers = session.both(body, "tool_choice")
        for answer in answers:
            whole = [call for call in answer.calls if _is_json(call.arguments)]
            if answer.finish_reason != "length":
                require(len(whole) == 1, f"finish_reason is {answer.finish_reason!r} after a cut")
            cut += answer.finish_reason == "length"
        _same(answers)
    require(cut > 0, "no limit cut the call")
    return f"{cut} cut answers"


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def usage_in_streams(session: ToolSession) -> str:
    body = session.body([WEATHER], _ASK, tool_choice=_named("get_weather"), stream=True)
    options = {"stream_options": {"include_usage": True}}
    usages = [
        chunk["usage"]
        for chunk in session.session.chunks({**body, **options}, "stream_options")
        if chunk.get("usage")
    ]
    require(bool(usages), "include_usage is accepted, and no chunk has usage")
    count = usages[-1].get("completion_tokens")
    require(isinstance(count, int) and count > 0, f"completion_tokens is {count!r}")
    return f"{count} tokens"


# -- values ------------------------------------------------------------------------------------


def _returns(schema: Json, value: Any) -> Callable[[ToolSession], str]:
    """Returns a check that forces one value by its schema, and wants it back."""

    def run(session: ToolSession) -> str:
        tool = _tool("record", {"value": schema})
        wanted = {"value": value}
        prompt = f"Call record with exactly these arguments: {json.dumps(wanted)}"
        body = session.body([tool], prompt, tool_choice=_named("record"))
        for answer in session.both(body, "tool_choice"):
            require_same("arguments", wanted, _typed(answer.only_call().values), "schema and call")
        return json.dumps(value, ensure_ascii=False)[:60]

    return run


def _typed(values: Json) -> Json:
    """Returns the values; 1.0 and 1 differ in their text alone, but True and 1 in their type."""
    for value in values.values():
        if isinstance(value, float) and value.is_integer():
            return {name: int(each) for name, each in values.items()}
    return values


_STRINGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "digits stay a string": ("02134", ("mlxcel#1336", "vllm#40861")),
    "the words true and null stay strings": ("true", ("vllm#40861",)),
    "an empty string": ("", ("vllm#40861",)),
    "quotes and backslashes": ('C:\\new "one"\\', ("vllm#10589",)),
    "line breaks and tabs": ("if x:\n\treturn 1\n", ("vllm#37809",)),
    "letters outside of ASCII": ("Grüße, 東京 🚀", ("vllm#19056",)),
    "JSON in a string": ('{"a": [1, {"b": null}]}', ("vllm#40861",)),
    "spaces around a string": ("  indented  ", ("vllm#40861",)),
    "tags in a string": ("<b>1 < 2 && 3 > 2</b>", ("vllm#40861",)),
    "a block of code in a string": ("```json\n{}\n```", ("vllm#22975",)),
}
_VALUES: dict[str, tuple[Json, Any, tuple[str, ...]]] = {
    "an integer": ({"type": "integer", "enum": [-7]}, -7, ("vllm#40861",)),
    "a number": ({"type": "number", "enum": [1.5]}, 1.5, ("vllm#40861",)),
    "a boolean": ({"type": "boolean", "enum": [False]}, False, ("vllm#40861", "renderers#52")),
    "null": ({"type": ["string", "null"], "enum": [None]}, None, ("vllm#40861", "renderers#52")),
    "an array": (
        {"type": "array", "items": _one_of("a b", "a b"), "minItems": 2, "maxItems": 2},
        ["a b", "a b"],
        ("vllm#40861",),
    ),
    "nested objects": (
        {
            "type": "object",
            "properties": {
                "inner": {
                    "type": "object",
                    "properties": {"name": _one_of('x "y"')},
                    "required": ["name"],
                    "additionalProperties": False,
                }
            },
            "required": ["inner"],
            "additionalProperties": False,
        },
        {"inner": {"name": 'x "y"'}},
        ("vllm#40861",),
    ),
    "one of two types": (
        {"anyOf": [{"type": "integer", "enum": [4]}, {"type": "null"}], "enum": [4]},
        4,
        ("renderers#52",),
    ),
}


def no_arguments(session: ToolSession) -> str:
    closed = {"type": "object", "properties": {}, "additionalProperties": False}
    tools: list[Json] = [
        {"name": "stop", "parameters": closed},
        {"name": "halt"},
        {"name": "end", "parameters": {}},
    ]
    for tool in tools:
        body = session.body([tool], "Stop.", tool_choice=_named(tool["name"]))
        for answer in session.both(body, "tool_choice"):
            values = answer.only_call().values
            require(values == {} or "parameters" in tool, f"{tool['name']!r} gets {values}")
    return f"{len(tools)} tools"


def names_of_dict_methods(session: ToolSession) -> str:
    """Uses parameters whose names a template or a parser may confuse with its own."""
    keys = ["items", "keys", "name", "arguments", "type", "parameters"]
    tool = _tool("mix", {key: _one_of(f"<{key}>") for key in keys})
    body = session.body([tool], "Call mix.", tool_choice=_named("mix"))
    for answer in session.both(body, "tool_choice"):
        wanted = {key: f"<{key}>" for key in keys}
        require_same("arguments", wanted, answer.only_call().values, "the schema and the call")
    return f"{len(keys)} parameters"


def similar_names(session: ToolSession) -> str:
    names = ["get", "get_weather", "get-weather_2", "get_weather_in_city"]
    tools = [_tool(name, {"city": _one_of("Oslo")}) for name in names]
    for name in names:
        body = session.body(tools, "Call a tool.", tool_choice=_named(name))
        for answer in session.both(body, "tool_choice"):
            require_same("name", name, answer.only_call().name, "tool_choice and the call")
    return f"{len(names)} tools"


def many_tools(session: ToolSession) -> str:
    tools = [_tool(f"tool_{number}", {"a": _one_of(f"{number}")}) for number in range(12)]
    body = session.body(tools, "Call tool_7.", tool_choice=_named("tool_7"))
    for answer in session.both(body, "tool_choice"):
        require_same("arguments", {"a": "7"}, answer.only_call().values, "the schema and the call")
    return f"{len(tools)} tools"


def references(session: ToolSession) -> str:
    tool = _tool("pick", {"colour": {"$ref": "#/$defs/colour"}})
    tool["parameters"]["$defs"] = {"colour": _one_of("red")}
    body = session.body([tool], "Pick red.", tool_choice=_named("pick"))
    for answer in session.both(body, "tool_choice"):
        require_same("arguments", {"colour": "red"}, answer.only_call().values, "schema and call")
    return "$ref and $defs"


# -- errors and load ---------------------------------------------------------------------------


def malformed_schemas(session: ToolSession) -> str:
    """Sends schemas that are wrong. A 4xx and an answer are right; a 5xx is not."""
    bad: list[Any] = [
        {"type": "object", "properties": {"a": 3}},
        {"type": "object", "properties": {"a": {"type": "text"}}},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/nowhere"}}},
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": None},
        [],
    ]
    for parameters in bad:
        body = session.body(
            [{"name": "f", "parameters": parameters}], "Call f.", tool_choice=_named("f")
        )
        status = session.session.post({**body, session.session.limit: 8}).status
        require(status < 500, f"parameters {json.dumps(parameters)} are answered with {status}")
    session.ask(session.body([WEATHER], _ASK, max_tokens=1))
    return f"{len(bad)} schemas, then an answer"


def strict_at_once(session: ToolSession) -> str:
    tools = [{**WEATHER, "strict": True}, {**TIME, "strict": True}]
    for tool in tools:
        tool["parameters"] = {**tool["parameters"], "additionalProperties": False}
        tool["parameters"]["required"] = list(tool["parameters"]["properties"])
    body = session.body(tools, _ASK, tool_choice="required", temperature=1.0)
    body["parallel_tool_calls"] = False
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(lambda _: session.ask(body, "strict"), range(_AT_ONCE)))
    for answer in answers:
        require(answer.only_call().values != {}, "a strict tool is called without arguments")
    return f"{_AT_ONCE} requests"


def several_choices(session: ToolSession) -> str:
    body = session.body([WEATHER], _ASK, tool_choice=_named("get_weather"), n=2, temperature=1.0)
    reply = session.session.post(body)
    if 400 <= reply.status < 500:
        raise NotOfferedError(f"n is refused with {reply}")
    require(reply.status == 200, f"answered {reply}")
    choices = reply.body["choices"]
    counts = [len(choice["message"].get("tool_calls") or ()) for choice in choices]
    require(counts == [1, 1], f"two choices have {counts} calls")
    return "2 choices"


# -- conversations -----------------------------------------------------------------------------


def _turns(content: str | None, results: list[Any], text: str = "") -> list[Json]:
    calls = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Oslo", "note": "Grüße"}'},
        }
        for number in range(len(results))
    ]
    return [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": text or "Weather in Oslo?"},
        {"role": "assistant", "content": content, "tool_calls": calls},
        *(
            {"role": "tool", "tool_call_id": call["id"], "content": result}
            for call, result in zip(calls, results, strict=True)
        ),
    ]


def history(session: ToolSession) -> str:
    """Sends conversations in the shapes that agents send."""
    parts = [{"type": "text", "text": "Rain."}]
    shapes = {
        "content null": _turns(None, ["Rain."]),
        "content ''": _turns("", ["Rain."]),
        "content with text": _turns("I look.", ["Rain."]),
        "two results": _turns(None, ["Rain.", '{"mm": 3}']),
        "a result in parts": _turns(None, [parts]),
        "an empty result": _turns(None, [""]),
        "a user after the result": [
            *_turns(None, ["Rain."]), {"role": "user", "content": "And tomorrow?"}
        ],
    }  # fmt: skip
    for name, messages in shapes.items():
        try:
            session.ask(session.body([WEATHER], messages, max_tokens=8), needs="")
        except FailedError as error:
            raise FailedError(f"{name}: {error}") from None
    return f"{len(shapes)} conversations"


def call_after_result(session: ToolSession) -> str:
    messages = _turns(None, ["Rain."])
    body = session.body([WEATHER, TIME], messages, tool_choice=_named("get_time"))
    answers = session.both(body, "tool_choice")
    for answer in answers:
        require(answer.only_call().values.get("zone") in ("UTC", "CET"), "the schema is broken")
        require(answer.calls[0].id != "call_0", "a call repeats the id of an earlier call")
    return _same(answers)


TOOL_CHECKS = (
    ToolCheck("required", ("vllm#24509", "vllm#53255", "club-3090#145"), required),
    ToolCheck("a named tool", ("vllm#9209", "vllm#25054"), named),
    ToolCheck("none", ("vllm#40861",), none),
    ToolCheck("auto", ("vllm#28297", "vllm#39056"), automatic),
    ToolCheck("one call at a time", ("vllm#40861",), one_at_a_time),
    ToolCheck("several calls", ("vllm#41967", "vllm#45068"), several),
    ToolCheck("bad tool_choice is refused", ("vllm#49216",), unknown_choice),
    ToolCheck("arguments are streamed in pieces", ("vllm#30439",), streamed_in_pieces),
    ToolCheck("a cut call is not complete", ("vllm#53269", "vllm#38911", "vllm#9053"), truncated),
    ToolCheck("usage in streams", ("vllm#27572",), usage_in_streams),
    *(
        ToolCheck(name, seen_in, _returns(_one_of(value), value))
        for name, (value, seen_in) in _STRINGS.items()
    ),
    *(
        ToolCheck(name, seen_in, _returns(schema, value))
        for name, (schema, value, seen_in) in _VALUES.items()
    ),
    ToolCheck("no arguments", ("vllm#40861",), no_arguments),
    ToolCheck("parameters with the names of methods", ("vllm#10589",), names_of_dict_methods),
    ToolCheck("tools with similar names", ("vllm#50986",), similar_names),
    ToolCheck("twelve tools", ("vllm#40861",), many_tools),
    ToolCheck("references in a schema", ("vllm#40861",), references),
    ToolCheck("malformed schemas", ("fak#8382",), malformed_schemas),
    ToolCheck("strict calls at once", ("vllm#27969", "vllm#44006", "vllm#44297"), strict_at_once),
    ToolCheck("several choices", ("vllm#38106",), several_choices),
    ToolCheck("earlier calls and results", ("vllm#30651", "mistral-vibe#454"), history),
    ToolCheck("a call after a result", ("vllm#56077",), call_after_result),
)
