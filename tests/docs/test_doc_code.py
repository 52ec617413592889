"""Runs Python code of the pages and the examples; parses JSON, YAML and TOML of the pages."""

from __future__ import annotations

import ast
import json
import runpy
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import PAGES, ROOT, blocks
from tests.server.server_process import Server

NOT_RUN = {
    "ModelSpec": "a module to write; tests/models/test_adding_a_model.py does",
    "starcoder2": "the same page's test",
    "constant_token": "parts of a folder; tests/features/test_one_folder.py compares them",
    "top_n_sigma": "a parameter to add; tests/features/samplers/test_adding_a_parameter.py does",
    "Qwen3-VL-2B": "a large model; tests/features/images/test_vision_engine.py has tiny ones",
    "from ollama import": "a client that the tests do not need; tests/server/test_ollama.py",
    "langchain_openai": "a client; tests/server/agents has its recording",
    "llama_index": "a client; tests/server/agents has its recording",
    "OpenAIResponsesModel": "a client; tests/server/agents has its recording",
    "smolagents": "a client; tests/server/agents has its recording",
    "haystack": "a client; tests/server/agents has its recording",
    "import dspy": "a client; tests/server/agents has its recording",
    "reasoning_content": "a model that thinks; tests/server/test_tools_and_thinking.py",
}
"""Parts of blocks that are not run, and why."""
PYTHON = [
    (page.relative_to(ROOT).as_posix(), text)
    for page in PAGES
    for language, text in blocks(page)
    if language == "python" and not any(part in text for part in NOT_RUN)
]
"""(page, block), in the order of the pages. The blocks of a page share their variables."""
TRAIN = ("train_lora", "rl", "trl_grpo")
"""Examples that train, and take long."""
EXAMPLES = [
    pytest.param(file, id=file.stem, marks=[pytest.mark.slow] if file.stem in TRAIN else [])
    for file in sorted((ROOT / "examples").glob("*.py"))
]


@pytest.mark.parametrize("page", sorted({page for page, _ in PYTHON}))
def test_python(
    page: str, doc_server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    names: dict[str, object] = {}
    for text in (text for name, text in PYTHON if name == page):
        exec(text.replace("http://localhost:8000", doc_server.url), names)
    if "llm" in names:
        names["llm"].shutdown()  # type: ignore[attr-defined]


@pytest.mark.parametrize("file", EXAMPLES)
def test_examples(
    file: Path, doc_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if file.stem == "trl_grpo":
        pytest.importorskip("trl")
    arguments = {
        "train_lora": str(tmp_path / "lora"), "rl": "2", "trl_grpo": doc_server.url,
    }  # fmt: skip
    argument = arguments.get(file.stem, f"{doc_server.url}/v1")
    monkeypatch.setattr(sys, "argv", [file.name, argument])
    runpy.run_path(str(file), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_data_is_read(page: Path) -> None:
    readers = {"json": json.loads, "yaml": yaml.safe_load, "toml": tomllib.loads}
    for language, text in blocks(page):
        if language in readers:
            assert readers[language](text.replace("...", "1")), text
        elif language == "python":
            ast.parse(text)
        else:
            assert language in ("sh", "diff", "ts", ""), language
