"""Formats are detected from chat templates."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.server.parsers.registry import TOOL_PARSERS, reasoning_format, tool_parser
from quire.text.chat_template import ChatTemplate
from quire.text.template_traits import probe

NAME = "{{ c.function.name }}"
ARGS = "{{ c.function.arguments | tojson }}"
DS = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
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
        ("<|channel|>analysis<|message|>...<|end|>", "gpt_oss"),
        ("<|user|>...<|end|>", None),
        ("<tool_call> and <function=", None),
    ],
)
def test_auto_reasoning(template: str, reasoning: str | None) -> None:
    format = reasoning_format("auto", template)
    assert (format and format.name) == reasoning


REAL = {
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", None),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "qwen3"),
    "Qwen3.5-4B": ("qwen3_xml", "qwen3"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("deepseek_v3", "qwen3"),
    "google-gemma-2-2b-it": (None, None),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3_json", None),
    "openai-gpt-oss-120b": ("gpt_oss", "gpt_oss"),
    "microsoft-Phi-3.5-mini-instruct": (None, None),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", None),
}


def detected(source: str) -> tuple[str | None, str | None]:
    traits = probe(ChatTemplate(source), {"bos_token": "<s>", "eos_token": "</s>"})
    parser, format = tool_parser("auto", traits.call), reasoning_format("auto", source)
    return parser and parser.name, format and format.name


@pytest.mark.parametrize("name", REAL)
def test_auto_on_real_templates(name: str) -> None:
    file = Path(os.environ.get("QUIRE_TEST_TEMPLATES", "/nowhere")) / f"{name}.jinja"
    if not file.is_file():
        pytest.skip("QUIRE_TEST_TEMPLATES names no folder with this template")
    assert detected(file.read_text("utf-8")) == REAL[name]


def test_names() -> None:
    parser = tool_parser("mistral", "<tool_call>")
    assert parser is not None
    assert parser.name == "mistral"
    assert tool_parser("none", "<tool_call>") is None
    format = reasoning_format("deepseek_r1", "")
    assert format is not None
    assert format.implicit_open
    assert reasoning_format("none", "</think>") is None
