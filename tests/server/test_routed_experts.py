"""Experts in answers of a server with a tiny model of experts."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

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
