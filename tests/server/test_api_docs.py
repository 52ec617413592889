"""docs/api.md lists every field that the server accepts, and every field of the official APIs."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import get_type_hints

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import EmbeddingCreateParams
from openai.types import completion_create_params as legacy_create_params
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params

from quire.sampling_params import PARAMETERS
from quire.server.apis.anthropic.protocol import MessagesRequest
from quire.server.apis.openai.protocol import ChatRequest, CompletionRequest
from quire.server.apis.openai.tokenize import TokenizeRequest
from quire.server.apis.responses.protocol import CreateRequest
from quire.server.apis.scoring.embeddings import EmbeddingRequest, PoolingRequest
from quire.server.apis.scoring.scores import RerankRequest, ScoreRequest
from quire.server.routes import ROUTES

DOCS = Path(__file__).parents[2] / "docs" / "api.md"


def fields_in(section: str) -> set[str]:
    """Returns the names in the first columns of a section's tables; `a.b` also counts as `a`."""
    text = DOCS.read_text("utf-8")
    body = re.split(rf"^## {section}$", text, flags=re.MULTILINE)[1]
    body = re.split(r"^## ", body, flags=re.MULTILINE)[0]
    cells = (line.split("|")[1] for line in body.splitlines() if line.startswith("| `"))
    names = {name for cell in cells for name in re.findall(r"`\.?([a-z_.0-9]+)`", cell)}
    return names | {name.partition(".")[0] for name in names}


@pytest.mark.parametrize(
    ("section", "taken", "official"),
    [
        (
            "Chat completions",
            ChatRequest,
            (completion_create_params.CompletionCreateParamsStreaming,),
        ),
        ("Embeddings", EmbeddingRequest, (EmbeddingCreateParams,)),
        ("Embeddings", PoolingRequest, ()),
        ("Scores", ScoreRequest, ()),
        ("Scores", RerankRequest, ()),
        ("Tokens", TokenizeRequest, ()),
        ("Responses", CreateRequest, (response_create_params.ResponseCreateParamsStreaming,)),
        (
            "Messages",
            MessagesRequest,
            (
                message_create_params.MessageCreateParamsStreaming,
                message_count_tokens_params.MessageCountTokensParams,
            ),
        ),
    ],
)
def test_every_field_is_listed(section: str, taken: type, official: tuple[type, ...]) -> None:
    listed = fields_in(section)
    assert listed
    listed |= fields_in("Sampling")
    ours = set(taken.model_fields)  # type: ignore[attr-defined]
    theirs = {name for kind in official for name in get_type_hints(kind)}
    assert ours - listed == set()
    assert theirs - listed == set()


def test_the_page_lists_every_field_of_completions() -> None:
    listed = fields_in("Completions") | fields_in("Chat completions") | fields_in("Sampling")
    official = get_type_hints(legacy_create_params.CompletionCreateParamsStreaming)
    assert set(CompletionRequest.model_fields) - listed == set()
    assert set(official) - listed == set()


def test_every_route_is_listed() -> None:
    text = re.sub(r"\{[^}]*\}", "{}", DOCS.read_text("utf-8"))
    paths = {re.sub(r"\{[^}]*\}", "{}", route.described_path) for route in ROUTES}
    missing = {path for path in paths if not re.search(rf"{re.escape(path)}(?![\w/])", text)}
    assert missing == set()


def test_every_error_code_is_listed() -> None:
    golden = Path(__file__).parents[1] / "repository" / "golden" / "errors.json"
    body = DOCS.read_text("utf-8").partition("\n## Errors\n")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|[^|]*\|([^|]*)\|", body, re.M))))
    assert set(json.loads(golden.read_text())["code"]) - listed == set()


def test_the_table_of_sampling_fields_is_the_declared_one() -> None:
    spec = importlib.util.spec_from_file_location(
        "parameter_table", DOCS.parents[1] / "tools" / "parameter_table.py"
    )
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    page = DOCS.read_text("utf-8")
    assert tool.with_table(page) == page, "run tools/parameter_table.py"
    assert not [parameter.name for parameter in PARAMETERS if not parameter.text]
