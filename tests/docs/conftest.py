"""The folder and the server that commands and code of the pages use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from quire.models import resolve_model_path
from quire.tools.simulate.engine_model import EngineModel
from tests.docs.pages import ROOT
from tests.server.server_process import Server, start_server

MODELS = (
    "my/model", "Qwen/Qwen3-8B", "Qwen/Qwen3-8B-AWQ", "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B",
    "google/gemma-3-12b-it", "bigcode/starcoder2-3b",
)  # fmt: skip
"""Names of models on the pages. In the test folder each is a link to the embedded model."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the models, texts and examples that the pages name."""
    made, embedded = tmp_path_factory.mktemp("pages"), resolve_model_path(None)
    for name in MODELS:
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).symlink_to(embedded)
    (made / "my/draft").symlink_to(embedded.with_name("quire-tiny-draft"))
    (made / "examples").symlink_to(ROOT / "examples")
    (made / "text.txt").symlink_to(ROOT / "lessons/11_quantization/story.txt")
    lines = [
        {"timestamp": 100 * i, "input_length": 1100, "output_length": 8, "hash_ids": [1, 2 + i]}
        for i in range(40)
    ]
    (made / "mooncake.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (made / "engine.json").write_bytes(msgspec.json.encode(EngineModel()))
    (made / "keys.toml").write_text('[alice]\nkey = "sk-alice"\n')
    # As the README has it.
    (made / "quire.yaml").write_text("model: my/model\nmax_num_seqs: 64\n")
    return made


@pytest.fixture(scope="session")
def doc_server() -> Iterator[Server]:
    """Returns a server at the repository's root, with the embedded model and an adapter."""
    running = start_server(
        "--served-model-name", "quire-tiny", "--max-model-len", "512",
        "--lora", f"dragon={ROOT / 'examples' / 'dragon-lora'}",
    )  # fmt: skip
    yield running
    running.stop()
