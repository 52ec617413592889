"""Experts in answers of a server with a tiny model of experts."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from msgspec.structs import replace as replace_params

from quire.config import EngineArgs, EngineConfig
from quire.engine.builder import resolve
from quire.sampling_params import SamplingParams
from quire.server.apis.openai.convert import MAX_EXPERT_BYTES, check_routed_experts
from quire.server.errors import ApiError
from tests.models.checkpoints import make
from tests.server.server_process import MODEL, start_server

PROMPT = list(range(20, 60))


def experts(choice: dict[str, Any]) -> np.ndarray[Any, Any]:
    found = choice["routed_experts"]
    return np.frombuffer(base64.b64decode(found["data"]), found["dtype"]).reshape(found["shape"])


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("experts")
    return folder, make(folder, "mixtral")


def test_answers_and_streams(oracle: tuple[Path, Any]) -> None:
    folder, model = oracle
    server = start_server(
        str(folder), "--skip-tokenizer-init", "--enable-return-routed-experts",
        "--max-model-len", "128", "--max-num-batched-tokens", "32",
    )  # fmt: skip
    body = {
        "model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0.9, "n": 2, "seed": 1,
        "ignore_eos": True, "return_token_ids": True, "return_routed_experts": True,
    }  # fmt: skip
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    for choice in answer["choices"]:
        text = torch.tensor([PROMPT + choice["token_ids"]])
        with torch.inference_mode():
            logits = model(text, output_router_logits=True).router_logits
        chosen = [each.topk(2).indices.sort(-1).values for each in logits]
        expected = torch.stack(chosen, 1).numpy()[:-1]
        np.testing.assert_array_equal(np.sort(experts(choice), -1), expected)
    client = server.client()
    stream = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0.9, seed=1, stream=True,
        extra_body={"ignore_eos": True, "return_routed_experts": True},
    )  # fmt: skip
    arrays = [chunk.choices[0].to_dict().get("routed_experts") for chunk in stream]
    assert arrays[:-1] == [None] * (len(arrays) - 1)
    np.testing.assert_array_equal(
        experts({"routed_experts": arrays[-1]}), experts(answer["choices"][0])
    )
    server.stop()


def config_of(folder: Path, **settings: Any) -> EngineConfig:
    return resolve(EngineArgs(model=str(folder), skip_tokenizer_init=True, **settings))


def test_sizes_are_bounded(oracle: tuple[Path, Any]) -> None:
    """Experts of long prompts do not fill the server's memory."""
    folder, model = oracle
    config = config_of(folder, enable_return_routed_experts=True)
    text = model.config
    assert config.experts_per_token == text.num_hidden_layers * text.num_experts_per_tok
    assert config_of(folder).experts_per_token == 0
    most = MAX_EXPERT_BYTES // (2 * config.experts_per_token)
    scheduler = replace(config.scheduler, max_model_len=most)
    config = replace(config, scheduler=scheduler)
    one = SamplingParams(return_routed_experts=True, max_tokens=10)
    check_routed_experts(config, one, [most])
    check_routed_experts(config, replace_params(one, n=4), [most // 4 - 10])
    check_routed_experts(config, replace_params(one, return_routed_experts=False), [most] * 9)
    for params, prompts in [
        (one, [most // 2 - 5, most // 2 - 5]),
        (replace_params(one, n=2), [most // 2]),
        (replace_params(one, n=2, max_tokens=None), [1]),
    ]:
        with pytest.raises(ApiError, match="lower 'max_tokens' or 'n'") as caught:
            check_routed_experts(config, params, [*prompts, 11])
        assert caught.value.param == "return_routed_experts"
