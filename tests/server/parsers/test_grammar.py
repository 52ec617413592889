"""Grammars of calls accept what their parser reads, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import llguidance
import pytest
from tokenizers import Tokenizer

import quire
from quire.grammar.grammar import compilable
from quire.grammar.lark import Rules
from quire.sampling_params import SamplingParams, StructuredOutputsParams
from quire.server.chat.dialogue import Dialogue, ToolChoice
from quire.server.chat.tools import constrain_params, parameters_of
from quire.server.errors import ApiError
from quire.server.parsers.chat_format import ChatFormat
from quire.server.parsers.registry import REASONING_FORMATS, TOOL_PARSERS
from quire.server.parsers.stream import CallArguments
from tests.server.parsers.harness import TOOLS, read

EMBEDDED = Path(quire.__file__).parent / "embedded" / "quire-tiny" / "tokenizer.json"
SCHEMAS = {**TOOLS, "weather": {**TOOLS["weather"], "additionalProperties": False}}

CALLS: dict[str, tuple[str, str, str]] = {
    # one call; two; one whose arguments break the schema
    "hermes": (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"days": 3}}\n</tool_call>',
    ),
    "llama3_json": (
        '{"name": "weather", "parameters": {"city": "Oslo", "unit": "C"}}',
        '{"name": "weather", "parameters": {"city": "Oslo"}}; {"name": "now", "parameters": {}}',
        '{"name": "weather", "parameters": {"city": "Oslo", "unit": "K"}}',
    ),
    "mistral": (
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]',
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}, '
        '{"name": "now", "arguments": {}}]',
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": 7}}]',
    ),
    "pythonic": (
        '[weather(city="Oslo", days=3)]',
        '[weather(city="Oslo", unit="F"), now()]',
        "[weather(days=3)]",
    ),
    "qwen3_xml": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo <b>\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
        "<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
        "<parameter=days>\nthree\n</parameter>\n</function>\n</tool_call>",
    ),
}

OSLO, ROME = '{"city": "Oslo", "days": 3}', '{"city": "Rome"}'
DS1, DS2, DS3 = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
DS4, DS5 = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"


def seed(*calls: str) -> str:
    return "\n".join(f"<seed:tool_call>\n{call}\n</seed:tool_call>" for call in calls)


def listed(open: str, close: str, entry: str) -> tuple[str, str, str]:
    """The cases of a list; `entry` has NAME and ARGS."""

    def calls(*pairs: tuple[str, str]) -> str:
        entries = [entry.replace("NAME", n).replace("ARGS", a) for n, a in pairs]
        return f"{open}[{', '.join(entries)}]{close}"

    return _three(calls)


def _three(calls: Callable[..., str]) -> tuple[str, str, str]:
    one, now = ("weather", OSLO), ("now", "{}")
    return calls(one), calls(one, now), calls(("weather", '{"days": 3}'))


def kimi(*pairs: tuple[str, str]) -> str:
    calls = [
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{a}<|tool_call_end|>"
        for i, (n, a) in enumerate(pairs)
    ]
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


def deepseek_v3(*pairs: tuple[str, str]) -> str:
    calls = [f"{DS2}function{DS3}{n}\n```json\n{a}\n```{DS4}" for n, a in pairs]
    return DS1 + "\n".join(calls) + DS5


def deepseek_v31(*pairs: tuple[str, str]) -> str:
    return DS1 + "".join(f"{DS2}{n}{DS3}{a}{DS4}" for n, a in pairs) + DS5


def functionary(*pairs: tuple[str, str]) -> str:
    return "".join(f"<function={n}>{a}</function>" for n, a in pairs)


def harmony(*pairs: tuple[str, str]) -> str:
    calls = [
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{a}" for n, a in pairs
    ]
    return "<|call|><|start|>assistant".join(calls)


NAMED = '{"name": "NAME", "arguments": ARGS}'
CALLS |= {
    "granite": listed("<|tool_call|>", "", NAMED),
    "phi4_mini": listed("<|tool_call|>", "<|/tool_call|>", NAMED),
    "command": listed(
        "<|START_ACTION|>", "<|END_ACTION|>", '{"tool_name": "NAME", "parameters": ARGS}'
    ),
    "apertus": listed("<|tools_prefix|>", "<|tools_suffix|>", '{"NAME": ARGS}'),
    "kimi_k2": _three(kimi),
    "deepseek_v3": _three(deepseek_v3),
    "deepseek_v31": _three(deepseek_v31),
    "functionary": _three(functionary),
    "gpt_oss": _three(harmony),
    "gemma4": tuple(
        f"<|tool_call>call:{call}<tool_call|>"
        for call in (
            'weather{city:<|"|>Oslo<|"|>,days:3}',
            'weather{city:<|"|>Oslo<|"|>}<tool_call|><|tool_call>call:now{}',
            "weather{days:3}",
        )
    ),
    "functiongemma": tuple(
        f"<start_function_call>call:{call}<end_function_call>"
        for call in (
            "weather{city:<escape>Oslo<escape>,days:3}",
            "weather{city:<escape>Oslo<escape>}<end_function_call><start_function_call>call:now{}",
            "weather{days:3}",
        )
    ),
    "lfm2": (
        '<|tool_call_start|>[weather(city="Oslo", days=3)]<|tool_call_end|>',
        '<|tool_call_start|>[weather(city="Oslo"), now()]<|tool_call_end|>',
        "<|tool_call_start|>[weather(days=3)]<|tool_call_end|>",
    ),
    "seed_oss": (
        seed("<function=weather>\n<parameter=city>Oslo</parameter>\n</function>"),
        seed(
            "<function=weather>\n<parameter=city>Oslo</parameter>\n</function>",
            "<function=now>\n</function>",
        ),
        seed("<function=weather>\n<parameter=days>x</parameter>\n</function>"),
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n'
        '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="days">x</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
    ),
    "glm45": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>\n"
        "<tool_call>now\n</tool_call>",
        "<tool_call>weather\n<arg_key>days</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
    ),
}

D = "｜DSML｜"
M3 = "]<]minimax[>["


def dsml(block: str, *calls: tuple[str, str]) -> str:
    inner = "".join(f'<{D}invoke name="{n}">\n{a}</{D}invoke>\n' for n, a in calls)
    return f"<{D}{block}>\n{inner}</{D}{block}>"


def dsml_argument(key: str, value: str, string: str) -> str:
    return f'<{D}parameter name="{key}" string="{string}">{value}</{D}parameter>\n'


def kimi_k3(*calls: tuple[str, str]) -> str:
    inner = "".join(
        f'<|open|>call tool="{n}" index="{i}"<|sep|>{a}<|close|>call<|sep|>'
        for i, (n, a) in enumerate(calls, 1)
    )
    return f"<|open|>tools<|sep|>{inner}<|close|>tools<|sep|>"


def kimi_k3_argument(key: str, value: str, kind: str) -> str:
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


def minicpm5(*calls: tuple[str, str]) -> str:
    return "\n".join(f'<function name="{n}">{a}</function>' for n, a in calls)


def hunyuan(*calls: tuple[str, str]) -> str:
    inner = "".join(
        f"<tool_call:opensource>{n}<tool_sep:opensource>\n{a}</tool_call:opensource>\n"
        for n, a in calls
    )
    return f"<tool_calls:opensource>\n{inner}</tool_calls:opensource>"


def hunyuan_argument(key: str, value: str) -> str:
    return (
        f"<arg_key:opensource>{key}</arg_key:opensource>\n"
        f"<arg_value:opensource>{value}</arg_value:opensource>\n"
    )


def minimax_m3(*calls: tuple[str, str]) -> str:
    inner = "".join(f'{M3}<invoke name="{n}">{a}{M3}</invoke>\n' for n, a in calls)
    return f"{M3}<tool_call>\n{inner}{M3}</tool_call>"


def minimax_m3_argument(key: str, value: str) -> str:
    return f"{M3}<{key}>{value}{M3}</{key}>"


def minimax_m1(*pairs: tuple[str, str]) -> str:
    lines = [NAMED.replace("NAME", n).replace("ARGS", a) for n, a in pairs]
    return "<tool_calls>\n{}\n</tool_calls>".format("\n".join(lines))


def gigachat(mark: str) -> Callable[..., str]:
    return lambda *pairs: "".join(
        mark + NAMED.replace("NAME", n).replace("ARGS", a) for n, a in pairs
    )


def solar(*pairs: tuple[str, str]) -> str:
    calls = [
        f"<|tool_call:begin|>a1b2c3d4e{i}<|tool_call:name|>{n}<|tool_call:args|>{a}"
        "<|tool_call:end|>"
        for i, (n, a) in enumerate(pairs)
    ]
    return f"<|tool_calls|>{''.join(calls)}<|calls|>"


def functionary_v32(*pairs: tuple[str, str]) -> str:
    return ">>>".join(f"{n}\n{a}" for n, a in pairs)


def _tagged(calls: Callable[..., str], argument: Callable[..., str], *kinds: str) -> Any:
    """The cases of a format with tags; `kinds` are the types of a string and of a number."""
    string, number = (kinds[:1], kinds[1:]) if kinds else ((), ())
    oslo, three = argument("city", "Oslo", *string), argument("days", "3", *number)
    wrong = argument("days", "three", *number)
    return (
        calls(("weather", oslo + three)),
        calls(("weather", oslo), ("now", "")),
        calls(("weather", oslo + wrong)),
    )


def _dsml(block: str) -> Any:
    return _tagged(lambda *calls: dsml(block, *calls), dsml_argument, "true", "false")


CALLS |= {
    "apriel": listed("<tool_calls>", "</tool_calls>", NAMED),
    "nemotron": listed("<TOOLCALL>", "</TOOLCALL>", NAMED),
    "command_r": listed("Action:\n```json\n", "```", '{"tool_name": "NAME", "parameters": ARGS}'),
    "minimax_m1": _three(minimax_m1),
    "gigachat31": _three(gigachat("<|function_call|>")),
    "gigachat3": _three(gigachat("<|message_sep|>\n\nfunction call<|role_sep|>\n")),
    "solar": _three(solar),
    "functionary_v32": _three(functionary_v32),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "kimi_k3": _tagged(kimi_k3, kimi_k3_argument, "string", "number"),
    "minicpm5": _tagged(minicpm5, lambda key, value: f'<param name="{key}">{value}</param>'),
    "hunyuan": _tagged(hunyuan, hunyuan_argument),
    "minimax_m3": _tagged(minimax_m3, minimax_m3_argument),
}

BARE = {
    "deepseek_v32": dsml("function_calls", ("f", dsml_argument("n", "%s", "true"))),
    "deepseek_v4": dsml("tool_calls", ("f", dsml_argument("n", "%s", "true"))),
    "kimi_k3": kimi_k3(("f", kimi_k3_argument("n", "%s", "string"))),
    "minicpm5": minicpm5(("f", '<param name="n">%s</param>')),
    "hunyuan": hunyuan(("f", hunyuan_argument("n", "%s"))),
    "minimax_m3": minimax_m3(("f", minimax_m3_argument("n", "%s"))),
    "qwen3_xml": "<tool_call>\n<function=f>\n<parameter=n>\n%s\n</parameter>\n</function>\n"
    "</tool_call>",
    "seed_oss": seed("<function=f>\n<parameter=n>%s</parameter>\n</function>"),
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="n">%s</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
    "glm45": "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
    "gemma4": '<|tool_call>call:f{n:<|"|>%s<|"|>}<tool_call|>',
    "functiongemma": "<start_function_call>call:f{n:<escape>%s<escape>}<end_function_call>",
}
"""A call with one argument, a string that is written as it is."""


@cache
def tokenizers() -> tuple[Tokenizer, llguidance.LLTokenizer]:
    text = EMBEDDED.read_text("utf-8")
    return Tokenizer.from_str(text), llguidance.LLTokenizer(text)


def added_tokens() -> Mapping[str, int]:
    return {token.content: id for id, token in tokenizers()[0].get_added_tokens_decoder().items()}


def accepts(params: SamplingParams, text: str) -> bool:
    assert params.structured_outputs is not None
    hub, tokenizer = tokenizers()
    matcher = llguidance.LLMatcher(tokenizer, compilable(params.structured_outputs))
    assert not matcher.is_error(), matcher.get_error()
    ids = hub.encode(text, add_special_tokens=False).ids
    return bool(matcher.validate_tokens(ids) == len(ids) and _ends(matcher, ids))


def _ends(matcher: llguidance.LLMatcher, ids: list[int]) -> bool:
    matcher.consume_tokens(ids)
    return matcher.is_accepting()


def params_for(
    parser: str | None,
    choice: ToolChoice,
    *,
    strict: bool = False,
    parallel: bool = True,
    reasoning: str | None = None,
    begins_open: bool | None = None,
    wanted: StructuredOutputsParams | None = None,
    schemas: Mapping[str, Any] = SCHEMAS,
) -> SamplingParams:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in schemas.items()
    ]
    format = ChatFormat(
        TOOL_PARSERS[parser] if parser else None,
        REASONING_FORMATS[reasoning] if reasoning else None,
        "",
        frozenset(),
    )
    dialogue = Dialogue(
        messages=[],
        params=SamplingParams(structured_outputs=wanted),
        tools=tools if parser else [],
        tool_choice=choice,
        parallel_tool_calls=parallel,
        request_id="r",
    )
    return constrain_params(dialogue, format, added_tokens(), begins_open)


@pytest.mark.parametrize("parser", CALLS)
def test_required(parser: str) -> None:
    one, two, wrong = CALLS[parser]
    params = params_for(parser, ToolChoice("required"))
    assert accepts(params, one)
    assert accepts(params, two)
    assert not accepts(params, wrong)
    assert not accepts(params, "Hello.")
    assert not accepts(params, "")
    assert len(read(TOOL_PARSERS[parser], [one])) == 1
    assert len(read(TOOL_PARSERS[parser], [two])) == 2


@pytest.mark.parametrize("parser", CALLS)
def test_one_at_a_time(parser: str) -> None:
    one, two, _ = CALLS[parser]
    params = params_for(parser, ToolChoice("required"), parallel=False)
    assert accepts(params, one)
    assert not accepts(params, two)


@pytest.mark.parametrize("parser", CALLS)
def test_named(parser: str) -> None:
    one, two, _ = CALLS[parser]
    params = params_for(parser, ToolChoice.named("weather"))
    assert accepts(params, one)
    assert not accepts(params, two)
    assert not accepts(params_for(parser, ToolChoice.named("now")), one)


@pytest.mark.parametrize("parser", CALLS)
def test_auto_is_free_unless_a_tool_is_strict(parser: str) -> None:
    one, two, wrong = CALLS[parser]
    assert params_for(parser, ToolChoice()).structured_outputs is None
    assert params_for(parser, ToolChoice("none"), strict=True).structured_outputs is None
    params = params_for(parser, ToolChoice(), strict=True)
    assert accepts(params, f"{TOOL_PARSERS[parser].answer}Hello, how are you? {{ [ <")
    assert accepts(params, one)
    assert accepts(params, two)
    assert not accepts(params, wrong)


def test_text_before_a_strict_call() -> None:
    one, _, wrong = CALLS["hermes"]
    params = params_for("hermes", ToolChoice(), strict=True)
    assert accepts(params, f"I look.\n\n{one}")
    assert not accepts(params, f"I look.\n\n{wrong}")


def test_after_reasoning() -> None:
    one, _, wrong = CALLS["hermes"]
    choice = ToolChoice("required")
    may = params_for("hermes", choice, reasoning="qwen3")
    assert accepts(may, one)
    assert accepts(may, f"<think>\nWhat is it? </\n</think>\n\n{one}")
    assert not accepts(may, f"<think>\n</think>\n\n{wrong}")
    must = params_for("hermes", choice, reasoning="qwen3", begins_open=True)
    assert not accepts(must, one)
    assert accepts(must, f"What is it?\n</think>\n\n{one}")
    closed = params_for("hermes", choice, reasoning="qwen3", begins_open=False)
    assert accepts(closed, one)
    assert not accepts(closed, f"<think>\n</think>\n\n{one}")
    text = params_for("hermes", choice, reasoning="mistral", begins_open=True)
    assert accepts(text, f"What is it? [/TH\n[/THINK]{one}")  # a mark that is not a token


def test_headers_of_gpt_oss() -> None:
    one, _, wrong = CALLS["gpt_oss"]
    thought = "<|channel|>analysis<|message|>What is it?<|end|><|start|>assistant"
    forced = params_for("gpt_oss", ToolChoice("required"), reasoning="gpt_oss")
    assert accepts(forced, one)
    assert accepts(forced, thought + one)
    assert not accepts(forced, thought + wrong)
    wanted = StructuredOutputsParams(json='{"type": "integer"}')
    params = params_for(None, ToolChoice(), wanted=wanted, reasoning="gpt_oss")
    assert accepts(params, "<|channel|>final<|message|>42")
    assert accepts(params, f"{thought}<|channel|>final<|message|>42")
    assert not accepts(params, f"{thought}42")
    assert not accepts(params, "<|channel|>final<|message|>no")


@pytest.mark.parametrize("parser", BARE)
def test_strings_written_without_quotes(parser: str) -> None:
    def params(strict: bool, **keywords: Any) -> SamplingParams:
        text = {"type": "string", "title": "A text.", **keywords}
        schema = {"type": "object", "properties": {"n": text}, "required": ["n"]}
        return params_for(parser, ToolChoice("required"), schemas={"f": schema}, strict=strict)

    for keywords in ({"const": "a b"}, {"enum": ["a b", "c"]}):
        assert accepts(params(True, **keywords), BARE[parser] % "a b")
        assert not accepts(params(True, **keywords), BARE[parser] % "a")
    for keywords in ({"maxLength": 3}, {"pattern": "^O"}, {"format": "date"}):
        assert accepts(params(False, **keywords), BARE[parser] % "a b")
        with pytest.raises(ApiError, match=f"'#/properties/n/{next(iter(keywords))}'"):
            params(True, **keywords)


def test_text_up_to_a_mark_with_an_added_token() -> None:
    hub, _ = tokenizers()
    rules = Rules(added_tokens())
    wanted = StructuredOutputsParams(grammar=rules.grammar(rules.add_until("</<tool_call>a>")))
    params = SamplingParams(structured_outputs=wanted)
    assert hub.token_to_id("<tool_call>") in added_tokens().values()
    for text in ("", "one </ two </", "<tool", "a>"):
        assert accepts(params, f"{text}</<tool_call>a>")
    for text in ("", "one", "one</", "one<tool_call>a>", "one</<tool_call>b>", "</<tool_call>a>b"):
        assert not accepts(params, text)


NESTED = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "enum": ["a", "b"]},
        "sizes": {"type": "array", "items": {"type": "integer"}},
        "place": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "no": {"type": "integer"}},
            "required": ["no"],
        },
        "bounded": {"type": "array", "items": {"type": "integer"}, "maxItems": 1},
    },
}


@pytest.mark.parametrize("strict", [False, True])
def test_elements_of_minimax_m3(strict: bool) -> None:
    def call(inner: str) -> str:
        return minimax_m3(("f", inner))

    element = minimax_m3_argument
    params = params_for("minimax_m3", ToolChoice("required"), schemas={"f": NESTED}, strict=strict)
    sizes = element("item", "1") + element("item", "2")
    no = element("no", "7")
    good = {
        "": {},
        element("name", "b"): {"name": "b"},
        element("sizes", sizes): {"sizes": [1, 2]},
        element("sizes", ""): {"sizes": []},
        element("place", element("street", "<b> & c") + no): {
            "place": {"street": "<b> & c", "no": 7}
        },
        element("bounded", "[1]"): {"bounded": [1]},
    }
    for inner, arguments in good.items():
        assert accepts(params, call(inner))
        parser = TOOL_PARSERS["minimax_m3"]({"f": NESTED})
        parts = [*parser.feed(call(inner)), *parser.finish()]
        text = "".join(part.text for part in parts if isinstance(part, CallArguments))
        assert json.loads(text) == arguments
    for inner in (
        element("name", "c"),
        element("sizes", element("item", "x")),
        element("place", element("street", "a")),
        element("place", no + element("street", "a")),
        element("bounded", "[1, 2]"),
    ):
        assert not accepts(params, call(inner))


NODE = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kids": {"type": "array", "items": {"$ref": "#"}},
        "twin": {"$ref": "#/properties/kids"},
    },
    "required": ["kids"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("strict", [False, True])
def test_references_beyond_definitions(strict: bool) -> None:
    def params(parser: str) -> SamplingParams:
        schema = {**NODE, "$schema": "http://json-schema.org/draft-07/schema#"}
        choice = ToolChoice("required")
        return params_for(parser, choice, schemas={"f": schema}, strict=strict)

    def qwen(kids: str, twin: str) -> str:
        return (
            f"<tool_call>\n<function=f>\n<parameter=kids>\n{kids}\n</parameter>\n"
            f"<parameter=twin>\n{twin}\n</parameter>\n</function>\n</tool_call>"
        )

    for kids, right in (('[{"kids": []}]', True), ("[[]]", False), ("[{}]", False)):
        assert accepts(params("qwen3_xml"), qwen(kids, "[]")) == right
        assert accepts(params("qwen3_xml"), qwen("[]", kids)) == right
        assert accepts(params("pythonic"), f"[f(kids={kids})]") == right


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("parser", BARE)
def test_a_schema_that_is_a_reference(parser: str, strict: bool) -> None:
    text = {"type": "object", "properties": {"n": {"type": "string"}}, "required": ["n"]}
    for schema in (
        {"$ref": "#/definitions/f", "definitions": {"f": text}},
        {"$ref": "#/$defs/g", "$defs": {"g": {"$ref": "#/$defs/f"}, "f": text}},
    ):
        params = params_for(parser, ToolChoice("required"), schemas={"f": schema}, strict=strict)
        assert accepts(params, BARE[parser] % "12")
        read = parameters_of({"function": {"name": "f", "parameters": schema}})
        assert (read["properties"], "$ref" in read) == (text["properties"], False)
    for loop in ({"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}):
        assert "$ref" in parameters_of({"function": {"name": "f", "parameters": loop}})


def test_definitions_that_each_property_needs_are_not_too_large() -> None:
    def params(value: Any) -> SamplingParams:
        text = {"type": "string", "description": "long " * 1000}
        properties = {f"p{place}": value for place in range(1000)}
        schema = {"type": "object", "properties": properties, "$defs": {"text": text}}
        return params_for("qwen3_xml", ToolChoice("required"), schemas={"f": schema})

    wanted = params({"type": "integer"}).structured_outputs
    assert wanted is not None
    assert len(wanted.grammar or "") < 200_000
    with pytest.raises(ApiError, match="at most 524288 are allowed") as refused:
        params({"$ref": "#/$defs/text"})
    assert (refused.value.param, refused.value.code) == ("tools", "grammar_too_large")


def test_many_values_of_strings_written_without_quotes() -> None:
    text = {"type": "string", "enum": [f"v{place}" for place in range(3000)]}
    schema = {"type": "object", "properties": {"n": text}, "required": ["n"]}
    for parser, call in BARE.items():
        params = params_for(parser, ToolChoice("required"), schemas={"f": schema})
        assert accepts(params, call % "v2999")
        assert not accepts(params, call % "v3000")


def test_every_format_with_bare_strings_is_here() -> None:
    assert BARE.keys() == {name for name, parser in TOOL_PARSERS.items() if parser.bare_strings}


OUTPUTS = [
    (StructuredOutputsParams(json='{"type": "integer"}'), "42", "no"),
    (StructuredOutputsParams(json_object=True), '{"a": 1}', "[1]"),
    (StructuredOutputsParams(regex=r"[0-9]+\/(x|\\/)/"), "1/x/", "1/x"),
    (StructuredOutputsParams(choice=tuple(f"c{n}" for n in range(4000))), "c3999", "c4000"),
    (StructuredOutputsParams(choice=("<think>", "a", "ab")), "ab", "b"),
    (StructuredOutputsParams(regex="a/b+|c"), "a/bb", "a/"),
    (StructuredOutputsParams(choice=("yes", 'n"o')), 'n"o', "maybe"),
    (StructuredOutputsParams(grammar='start: a\na: "x" B\nB: /y+/'), "xyy", "x"),
]


@pytest.mark.parametrize(("wanted", "good", "bad"), OUTPUTS)
def test_structured_outputs_after_reasoning(
    wanted: StructuredOutputsParams, good: str, bad: str
) -> None:
    alone = params_for(None, ToolChoice(), wanted=wanted)
    assert alone.structured_outputs is wanted
    closed = params_for(None, ToolChoice(), wanted=wanted, reasoning="qwen3", begins_open=False)
    assert closed.structured_outputs is wanted
    params = params_for(None, ToolChoice(), wanted=wanted, reasoning="qwen3")
    assert accepts(params, good)
    assert accepts(params, f"<think>hm</think>\n\n{good}")
    assert not accepts(params, bad)
    assert not accepts(params, f"<think>hm</think>\n\n{bad}")


@pytest.mark.parametrize(("wanted", "good", "bad"), OUTPUTS)
def test_structured_outputs_together_with_tools(
    wanted: StructuredOutputsParams, good: str, bad: str
) -> None:
    one, _, wrong = CALLS["hermes"]
    params = params_for("hermes", ToolChoice(), wanted=wanted, strict=True)
    assert accepts(params, good)
    assert accepts(params, one)
    assert not accepts(params, bad)
    assert not accepts(params, wrong)
    forced = params_for("hermes", ToolChoice("required"), wanted=wanted)
    assert not accepts(forced, good)
    assert accepts(forced, one)


@pytest.mark.parametrize("parser", CALLS)
def test_schemas_with_definitions(parser: str) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"$ref": "#/$defs/small"}},
        "required": ["n"],
        "$defs": {"small": {"type": "integer", "minimum": 0, "maximum": 9}},
    }
    params = params_for(parser, ToolChoice("required"), schemas={"f": schema})
    texts = {
        "hermes": '<tool_call>\n{"name": "f", "arguments": {"n": %s}}\n</tool_call>',
        "llama3_json": '{"name": "f", "parameters": {"n": %s}}',
        "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"n": %s}}]',
        "pythonic": "[f(n=%s)]",
        "lfm2": "<|tool_call_start|>[f(n=%s)]<|tool_call_end|>",
        **{name: text.replace('<|"|>', "").replace("<escape>", "") for name, text in BARE.items()},
        "deepseek_v32": BARE["deepseek_v32"].replace('"true"', '"false"'),
        "deepseek_v4": BARE["deepseek_v4"].replace('"true"', '"false"'),
        "kimi_k3": BARE["kimi_k3"].replace('"string"', '"object"'),
    }
    of_json = CALLS[parser][0].replace("weather", "f").replace(OSLO, '{"n": %s}')
    text = texts.get(parser, of_json)
    assert accepts(params, text % 7)
    assert not accepts(params, text % 70)


UNENFORCEABLE = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "contains": {"type": "integer"}},
        "b": {"enum": [1, 2**60]},
        "c": {"type": "integer", "not": {"const": 3}},
    },
    "required": ["a"],
}


def test_keywords_that_cannot_be_enforced_are_errors_of_strict_tools_only() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": [], "c": 3}}\n</tool_call>'
    schemas = {"f": UNENFORCEABLE}
    loose = params_for("hermes", ToolChoice("required"), schemas=schemas)
    assert accepts(loose, text)
    assert not accepts(loose, text.replace('"a"', '"d"'))
    assert not accepts(loose, text.replace("3", '"3"'))
    with pytest.raises(ApiError, match="'contains' cannot be enforced") as error:
        params_for("hermes", ToolChoice("required"), schemas=schemas, strict=True)
    assert error.value.param == "tools[0].function.parameters"


@pytest.mark.parametrize("parser", CALLS)
@pytest.mark.parametrize(
    "properties", [{"a": {"enum": 3}}, {"a": 3}, {"a": {"type": "float"}}, {"a": {"$defs": []}}]
)
def test_malformed_schemas_are_named(parser: str, properties: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": properties}
    with pytest.raises(ApiError) as error:
        params_for(parser, ToolChoice("required"), schemas={"f": schema})
    assert error.value.param == "tools[0].function.parameters"


@pytest.mark.parametrize("parser", CALLS)
def test_keywords_over_all_arguments_of_a_call(parser: str) -> None:
    schemas = {"f": {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}}
    if not TOOL_PARSERS[parser].by_property:
        params_for(parser, ToolChoice("required"), schemas=schemas, strict=True)
        return
    with pytest.raises(ApiError, match="'#/minProperties' cannot be enforced"):
        params_for(parser, ToolChoice("required"), schemas=schemas, strict=True)


def test_gbnf_after_reasoning() -> None:
    wanted = StructuredOutputsParams(grammar='root ::= "x" [0-9]+')
    params = params_for(None, ToolChoice(), wanted=wanted, reasoning="qwen3")
    assert accepts(params, "<think>a</think>x12")
    assert not accepts(params, "<think>a</think>y")


def test_names_and_keys_are_quoted() -> None:
    schema = {"type": "object", "properties": {'a"b\\': {"type": "integer"}}}
    params = params_for("hermes", ToolChoice("required"), schemas={"f": schema})
    key = json.dumps('a"b\\')
    assert accepts(params, f'<tool_call>\n{{"name": "f", "arguments": {{{key}: 1}}}}\n</tool_call>')
