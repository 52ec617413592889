"""LoRA adapters over HTTP, on a real server process with the embedded model."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import torch
from safetensors.torch import save_file

from quire import LLM, LoRARequest, SamplingParams
from tests.server.server_process import MODEL, Server, start_server

PROMPT = "Once upon a time there was"
LAYERS, HIDDEN, WIDTH = 8, 320, 704


def write_adapter(folder: Path, seed: int, rank: int = 4) -> Path:
    """Saves a random adapter of the embedded model's last projections."""
    draw = torch.Generator().manual_seed(seed)
    found = {}
    for layer in range(LAYERS):
        name = f"base_model.model.model.layers.{layer}.mlp.down_proj"
        found[f"{name}.lora_A.weight"] = torch.randn(rank, WIDTH, generator=draw) * 0.1
        found[f"{name}.lora_B.weight"] = torch.randn(HIDDEN, rank, generator=draw)
    folder.mkdir(parents=True)
    save_file(found, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["down_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("first", "many/second", "many/third")):
        write_adapter(folder / name, seed)
    (folder / "keys.toml").write_text(
        '[boss]\nkey = "boss"\nadmin = true\n[plain]\nkey = "plain"\n'
        f'[bound]\nkey = "bound"\nmodels = ["second"]\n[base]\nkey = "base"\nmodels = ["{MODEL}"]\n'
    )
    (folder / "keys.toml").chmod(0o600)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, str]:
    """Returns greedy texts by model."""
    llm = LLM(device="cpu", kv_cache_gb=0.25, enable_lora=True, max_loras=1)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = {}
    for name, path in {MODEL: None, "first": "first", "second": "many/second"}.items():
        request = None if path is None else LoRARequest(name, folder / path)
        (output,) = llm.generate([PROMPT], params, False, lora_request=request)
        found[name] = output.outputs[0].text
    llm.shutdown()
    assert len(set(found.values())) == 3
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    server = start_server(
        "--lora", f"first={folder / 'first'}", "--lora-dir", str(folder / "many"),
        "--max-loras", "1", "--api-key-file", str(folder / "keys.toml"),
    )  # fmt: skip
    yield server
    server.stop()


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.client(api_key="boss")


def complete(client: openai.OpenAI, model: str) -> Any:
    return client.completions.create(
        model=model, prompt=PROMPT, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
    )


def post(server: Server, path: str, body: dict[str, Any], key: str = "boss") -> tuple[int, str]:
    request = urllib.request.Request(
        f"{server.url}{path}", json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )  # fmt: skip
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_model_is_chosen_by_name(client: openai.OpenAI, expected: dict[str, str]) -> None:
    for name in (MODEL, "first", "second", "first", MODEL):
        answer = complete(client, name)
        assert answer.model == name
        assert answer.choices[0].text == expected[name]


def test_models_are_listed_with_their_parents(client: openai.OpenAI) -> None:
    cards = {card.id: card for card in client.models.list()}
    assert list(cards) == [MODEL, "first", "second", "third"]
    assert cards[MODEL].parent is None  # type: ignore[attr-defined]
    assert cards["first"].root == "first"  # type: ignore[attr-defined]
    assert all(cards[name].parent == MODEL for name in ("first", "second"))  # type: ignore[attr-defined]
    assert client.models.retrieve("third").id == "third"


def test_every_route(server: Server, client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Tell me a story."}]
    options: Any = {"max_tokens": 8, "temperature": 0.0}
    base = client.chat.completions.create(model=MODEL, messages=messages, **options)
    chat = client.chat.completions.create(model="first", messages=messages, **options)
    assert chat.model == "first"
    assert chat.choices[0].message.content != base.choices[0].message.content
    choice: Any = {"structured_outputs": {"choice": ["a red kite", "a blue whale"]}}
    told = client.chat.completions.create(model="first", messages=messages, extra_body=choice)
    assert told.choices[0].message.content in choice["structured_outputs"]["choice"]
    chunks = list(
        client.chat.completions.create(model="first", messages=messages, stream=True, **options)
    )
    assert {chunk.model for chunk in chunks} == {"first"}
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == chat.choices[0].message.content
    response = client.responses.create(
        model="first", input="Tell me a story.", max_output_tokens=8, temperature=0.0
    )
    assert (response.model, response.output_text) == ("first", text)
    other = anthropic.Anthropic(base_url=server.url, api_key="boss", max_retries=0)
    message = other.messages.create(
        model="first", messages=messages, max_tokens=8, extra_body={"temperature": 0.0}
    )
    assert message.model == "first"
    assert message.content[0].text == text  # type: ignore[union-attr]
    plain, adapted = (
        client.embeddings.create(model=model, input=PROMPT) for model in (MODEL, "first")
    )
    assert adapted.model == "first"
    assert plain.data[0].embedding != adapted.data[0].embedding


def test_unknown_models(server: Server, client: openai.OpenAI) -> None:
    for name in ("nothing", "..", "many/second", "../first"):
        with pytest.raises(openai.NotFoundError) as refused:
            complete(client, name)
        assert refused.value.code == "model_not_found"


def test_load_and_unload(
    server: Server, client: openai.OpenAI, folder: Path, expected: dict[str, str]
) -> None:
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    body: dict[str, Any] = {"lora_name": "new", "lora_path": str(folder / "first")}
    assert post(server, load, body) == (
        200, "Success: LoRA adapter 'new' added successfully."
    )  # fmt: skip
    assert complete(client, "new").choices[0].text == expected["first"]
    status, text = post(server, load, body)
    assert status == 400
    assert "has already been loaded" in text
    body = {"lora_name": "new", "lora_path": str(folder / "many/second"), "load_inplace": True}
    assert post(server, load, body)[0] == 200
    assert complete(client, "new").choices[0].text == expected["second"]
    assert "new" in [card.id for card in client.models.list()]
    assert post(server, unload, {"lora_name": "new"}) == (
        200, "Success: LoRA adapter 'new' removed successfully."
    )  # fmt: skip
    status, text = post(server, unload, {"lora_name": "new"})
    assert status == 404
    assert "cannot be found" in text
    with pytest.raises(openai.NotFoundError):
        complete(client, "new")


def test_refused_loads(server: Server, folder: Path) -> None:
    for body, message in [
        ({"lora_name": "x"}, "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_name": "x", "lora_path": str(folder)}, "adapter_config.json cannot be read"),
        ({"lora_name": MODEL, "lora_path": str(folder / "first")}, "the served model"),
        ({"lora_name": ".x", "lora_path": str(folder / "first")}, "does not begin with a dot"),
        ({"lora_name": "x", "lora_path": "y", "z": 1}, "Unknown parameter: 'z'"),
    ]:
        status, text = post(server, "/v1/load_lora_adapter", body)
        assert status == 400
        assert message in text
        assert str(folder) not in text


def test_rights_of_keys(server: Server, folder: Path) -> None:
    body = {"lora_name": "x", "lora_path": str(folder / "first")}
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        status, text = post(server, path, body, key="plain")
        assert status == 403
        assert "may not load or unload" in text
    bound = server.client(api_key="bound")
    assert [card.id for card in bound.models.list()] == ["second"]
    assert complete(bound, "second").model == "second"
    base = server.client(api_key="base")
    assert complete(base, MODEL).model == MODEL
    for client, name, has in (
        (bound, MODEL, "second"), (bound, "first", "second"), (base, "second", MODEL)
    ):  # fmt: skip
        with pytest.raises(openai.NotFoundError, match=f"this server has '{has}'"):
            complete(client, name)


def test_metrics(server: Server) -> None:
    request = urllib.request.Request(
        f"{server.url}/metrics", headers={"Authorization": "Bearer boss"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read().decode()
    assert 'quire_adapters{state="resident"} 1.0' in text
    assert "quire_adapter_loads_total" in text
    assert "quire_adapter_failures_total" in text
