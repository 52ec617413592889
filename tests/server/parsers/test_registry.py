"""Formats are detected from chat templates."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from quire.server.parsers.registry import TOOL_PARSERS, reasoning_format, tool_parser
from tests.server.parsers.template_facts import FACTS, facts

NAME = "{{ c.function.name }}"
ARGS = "{{ c.function.arguments | tojson }}"
DS = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
ITEMS = "{% for k, v in c.function.arguments | items %}"
D, M = "｜DSML｜", "]<]minimax[>["
WRITTEN = {
    "hermes": f'<tool_call>\n{{"name": "{NAME}", "arguments": {ARGS}}}\n</tool_call>',
    "mistral": f'[TOOL_CALLS][{{"name": "{NAME}", "arguments": {ARGS}, "id": "{{{{ c.id }}}}"}}]',
    "llama3_json": f'{{"name": "{NAME}", "parameters": {ARGS}}}',
    "qwen3_xml": f"<tool_call>\n<function={NAME}>\n{{% for k, v in c.function.arguments | items %}}"
    "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    "seed_oss": f"<seed:tool_call>\n<function={NAME}>\n"
    "{% for k, v in c.function.arguments | items %}"
    "<parameter={{ k }}>{{ v }}</parameter>\n{% endfor %}</function>\n</seed:tool_call>",
    "minimax_m2": f'<minimax:tool_call>\n<invoke name="{NAME}">\n'
    "{% for k, v in c.function.arguments | items %}"
    '<parameter name="{{ k }}">{{ v }}</parameter>\n{% endfor %}</invoke>\n</minimax:tool_call>',
    "glm45": f"<tool_call>{NAME}\n{{% for k, v in c.function.arguments | items %}}"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions."
    f"{NAME}:0<|tool_call_argument_begin|>{ARGS}<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v3": f"{DS}function<｜tool▁sep｜>{NAME}\n```json\n{ARGS}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"{DS}{NAME}<｜tool▁sep｜>{ARGS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "command": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "'
    f'{NAME}", "parameters": {ARGS}}}\n]<|END_ACTION|>',
    "apertus": f'<|tools_prefix|>[{{"{NAME}": {ARGS}}}]<|tools_suffix|>',
    "granite": f'<|tool_call|>[{{"name": "{NAME}", "arguments": {ARGS}}}]',
    "phi4_mini": f'<|tool_call|>[{{"name": "{NAME}", "arguments": {ARGS}}}]<|/tool_call|>',
    "lfm2": f"<|tool_call_start|>[{NAME}({{% for k, v in c.function.arguments | items %}}"
    "{{ k }}={{ v | tojson }}{% endfor %})]<|tool_call_end|>",
    "gemma4": f"<|tool_call>call:{NAME}{{{{ '{{' }}}}"
    "{% for k, v in c.function.arguments | items %}"
    '{{ k }}:<|"|>{{ v }}<|"|>{% endfor %}}<tool_call|>',
    "functiongemma": f"<start_function_call>call:{NAME}{{{{ '{{' }}}}"
    "{% for k, v in c.function.arguments | items %}{{ k }}:<escape>{{ v }}<escape>{% endfor %}}"
    "<end_function_call>",
    "gpt_oss": f" to=functions.{NAME}<|channel|>commentary json<|message|>{ARGS}<|call|>",
    "functionary": f"<function={NAME}>{ARGS}</function>",
    "apriel": f'<tool_calls>[{{"name": "{NAME}", "arguments": {ARGS}}}]</tool_calls>',
    "minimax_m1": f'<tool_calls>\n{{"name": "{NAME}", "arguments": {ARGS}}}\n</tool_calls>',
    "nemotron": f'<TOOLCALL>[{{"name": "{NAME}", "arguments": {ARGS}}}]</TOOLCALL>',
    "command_r": f'\nAction:\n```json\n[\n{{"tool_name": "{NAME}", "parameters": {ARGS}}}\n]```\n',
    "gigachat31": f'<|function_call|>{{"name": "{NAME}", "arguments": {ARGS}}}<|message_sep|>',
    "gigachat3": "<|message_sep|>\n\nfunction call<|role_sep|>\n"
    f'{{"name": "{NAME}", "arguments": {ARGS}}}<|message_sep|>',
    "solar": f"<|tool_calls|><|tool_call:begin|>{{{{ c.id }}}}<|tool_call:name|>{NAME}"
    f"<|tool_call:args|>{ARGS}<|tool_call:end|><|calls|>",
    "functionary_v32": f">>>{NAME}\n{ARGS}",
    "deepseek_v32": f'<{D}function_calls>\n<{D}invoke name="{NAME}">\n{ITEMS}'
    f'<{D}parameter name="{{{{ k }}}}" string="true">{{{{ v }}}}</{D}parameter>\n{{% endfor %}}'
    f"</{D}invoke>\n</{D}function_calls>",
    "deepseek_v4": f'<{D}tool_calls>\n<{D}invoke name="{NAME}">\n{ITEMS}'
    f'<{D}parameter name="{{{{ k }}}}" string="true">{{{{ v }}}}</{D}parameter>\n{{% endfor %}}'
    f"</{D}invoke>\n</{D}tool_calls>",
    "kimi_k3": f'<|open|>tools<|sep|><|open|>call tool="{NAME}" index="1"<|sep|>{ITEMS}'
    '<|open|>argument key="{{ k }}" type="string"<|sep|>{{ v }}<|close|>argument<|sep|>'
    "{% endfor %}<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
    "minicpm5": f'<function name="{NAME}">{ITEMS}<param name="{{{{ k }}}}">{{{{ v }}}}</param>'
    "{% endfor %}</function>",
    "hunyuan": f"<tool_calls:opensource>\n<tool_call:opensource>{NAME}<tool_sep:opensource>\n"
    f"{ITEMS}<arg_key:opensource>{{{{ k }}}}</arg_key:opensource>\n"
    "<arg_value:opensource>{{ v }}</arg_value:opensource>\n{% endfor %}"
    "</tool_call:opensource>\n</tool_calls:opensource>",
    "minimax_m3": f'{M}<tool_call>\n{M}<invoke name="{NAME}">{ITEMS}{M}<{{{{ k }}}}>{{{{ v }}}}'
    f"{M}</{{{{ k }}}}>{{% endfor %}}{M}</invoke>\n{M}</tool_call>",
    "pythonic": f"[{NAME}({{% for k, v in c.function.arguments | items %}}"
    "{{ k }}={{ v | tojson }}{% endfor %})]",
}


def template_of(call: str) -> str:
    """Returns a chat template that writes calls in this way."""
    return (
        "{{ tools[0].function.name if tools }}{% for m in messages %}<|{{ m.role }}|>\n"
        f"{{{{ m.content or '' }}}}{{% for c in m.tool_calls or [] %}}{call}{{% endfor %}}<|end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )


def test_every_format_has_a_template() -> None:
    assert WRITTEN.keys() == TOOL_PARSERS.keys()


@pytest.mark.parametrize("name", WRITTEN)
def test_auto_takes_the_parser_that_reads_the_templates_call(name: str) -> None:
    assert detected(template_of(WRITTEN[name])) == (name, None)


def test_auto_where_ids_of_calls_name_their_tools() -> None:
    by_id = WRITTEN["kimi_k2"].replace(f"functions.{NAME}:0", "{{ c.id }}")
    assert detected(template_of(by_id)) == ("kimi_k2", None)


@pytest.mark.parametrize(
    "call",
    [
        "<tool_call>{{ c.function.name }}",
        '<call>{"name": "{{ c.function.name }}"}</call>',
        f"<tool_call>[{NAME}]</tool_call> not <function=...> nor [TOOL_CALLS] {ARGS}",
        "",
    ],
)
def test_auto_refuses_parsers_that_do_not_read_the_call(call: str) -> None:
    assert detected(template_of(call)) == (None, None)


@pytest.mark.parametrize(
    ("template", "reasoning"),
    [
        ("content.split('</think>')[-1]", "qwen3"),
        ("[THINK]...[/THINK] and [TOOL_CALLS]", "mistral"),
        ("<seed:think></seed:think>", "seed_oss"),
        ("<|START_THINKING|><|END_THINKING|>", "command"),
        ("<|inner_prefix|><|inner_suffix|>", "apertus"),
        ("<|channel>thought <channel|>", "gemma4"),
        ("'<think{}>'.format(suffix) and '</think{}>'.format(suffix)", "hunyuan"),
        ("<mm:think></mm:think>", "minimax_m3"),
        ("open_tag('think') and <|end_of_msg|>", "kimi_k3"),
        ("<|begin|>assistant<|think|> and <|end|>", "solar"),
        ("after the marker [BEGIN FINAL RESPONSE].", "apriel"),
        ("<|channel|>analysis<|message|>...<|end|>", "gpt_oss"),
        ("<|user|>...<|end|>", None),
        ("<tool_call> and <function=", None),
    ],
)
def test_auto_reasoning(template: str, reasoning: str | None) -> None:
    format = reasoning_format("auto", template)
    assert (format and format.name) == reasoning


REAL: dict[str, dict[str, Any]] = json.loads(FACTS.read_text("utf-8"))
"""Facts about the 70 public templates of llama.cpp. `format` is the template's own format."""


def detected(source: str) -> tuple[str | None, str | None]:
    found = facts(source)
    return found["parser"], found["reasoning"]


@pytest.mark.parametrize("name", REAL)
def test_auto_on_what_real_templates_write(name: str) -> None:
    fact = REAL[name]
    template = "".join(fact["hints"]) if fact["shows_tools"] else ""
    parser = tool_parser("auto", fact["call"], template)
    assert (parser and parser.name) == fact["parser"]
    assert fact["parser"] in (fact["format"], None)  # unsure, but never wrong
    reasoning = reasoning_format("auto", fact["reasoning_mark"] or "")
    assert (reasoning and reasoning.name) == fact["reasoning"]


def test_auto_is_right_for_most_real_templates() -> None:
    right = [name for name, fact in REAL.items() if fact["parser"] == fact["format"]]
    assert len(REAL) == 70
    assert len(right) >= 65


@pytest.mark.parametrize("name", REAL)
def test_auto_on_real_templates(name: str) -> None:
    file = Path(os.environ.get("QUIRE_TEST_TEMPLATES", "/nowhere")) / f"{name}.jinja"
    if not file.is_file():
        pytest.skip("QUIRE_TEST_TEMPLATES names no folder with this template")
    found = facts(file.read_text("utf-8"))
    if found["sha256"] == REAL[name]["sha256"]:
        assert found == {key: REAL[name][key] for key in found}


def test_names() -> None:
    parser = tool_parser("mistral", "<tool_call>")
    assert parser is not None
    assert parser.name == "mistral"
    assert tool_parser("none", "<tool_call>") is None
    format = reasoning_format("deepseek_r1", "")
    assert format is not None
    assert format.implicit_open
    assert reasoning_format("none", "</think>") is None
