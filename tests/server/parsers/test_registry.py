"""The format that a chat template teaches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.server.parsers.registry import reasoning_format, tool_parser

SNIPPETS = [
    ("For each call write <tool_call>{...}</tool_call>", "hermes", None),
    ("<tool_call>\n<function=name>\n<parameter=key>", "qwen3_xml", None),
    ("{{ '[TOOL_CALLS][' }}", "mistral", None),
    ("[THINK]...[/THINK] and [TOOL_CALLS]", "mistral", "mistral"),
    ('{"name": function name, "parameters": dictionary}', "llama3_json", None),
    ("[func_name1(params_name1=params_value1)]", "pythonic", None),
    ("content.split('</think>')[-1]", None, "qwen3"),
    ("{% for message in messages %}{{ message.content }}{% endfor %}", None, None),
]
REAL = {
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", None),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "qwen3"),
    "Qwen3.5-4B": ("qwen3_xml", "qwen3"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": (None, "qwen3"),
    "google-gemma-2-2b-it": (None, None),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3_json", None),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", None),
}


def detected(template: str) -> tuple[str | None, str | None]:
    parser, format = tool_parser("auto", template), reasoning_format("auto", template)
    return parser and parser.name, format and format.name


@pytest.mark.parametrize(("template", "parser", "reasoning"), SNIPPETS)
def test_auto(template: str, parser: str | None, reasoning: str | None) -> None:
    assert detected(template) == (parser, reasoning)


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
    assert format.implied
    assert reasoning_format("none", "</think>") is None
