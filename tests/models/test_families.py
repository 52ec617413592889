"""Every family gives the same logits as transformers."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.models import Decoder, build_model, load_config, load_weights, spec_from_config
from tests.models.checkpoints import CASES, LONGROPE, make
from tests.models.harness import Harness
from tests.slow import slow


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    model = build_model(spec_from_config(load_config(folder)), device="cpu", dtype=dtype)
    load_weights(model, folder)
    return model


def prompts_of(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, 211) for _ in range(length)] for length in (1, 8, 37)]


@pytest.fixture(autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(1)


SLOW = "deepseek-v3-halves", "glm4-moe-lite"


@pytest.mark.parametrize("case", [slow(case) if case in SLOW else case for case in CASES])
def test_logits_and_greedy_tokens(case: str, tmp_path: Path) -> None:
    oracle = make(tmp_path, case)
    model = load(tmp_path)
    prompts = prompts_of(1)

    harness = Harness(model, padding=3)
    found = harness.generate(prompts, 64, chunk=7)
    assert max(len(set(tokens)) for tokens in found) > 16
    sequences = [prompt + tokens for prompt, tokens in zip(prompts, found, strict=True)]
    expected = logits_of(oracle, sequences)
    for prompt, tokens, logits in zip(prompts, found, expected, strict=True):
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens
    check_logits(Harness(model, block_size=16), expected, sequences, 1e-4)


def logits_of(oracle: Any, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Returns transformers' logits for all tokens of each sequence in one pass."""
    with torch.inference_mode():
        return [oracle(torch.tensor([sequence])).logits[0].float() for sequence in sequences]


def check_logits(
    harness: Harness, wanted: list[torch.Tensor], sequences: list[list[int]], tolerance: float
) -> None:
    """Rows of prompts, chunks, drafts and single tokens, mixed, against one full forward pass."""
    rows = [harness.add(sequence) for sequence in sequences]
    found: list[list[torch.Tensor]] = [[] for _ in rows]
    draw = random.Random(3)
    while pending := [row for row in rows if row.computed < len(row.tokens)]:
        sizes = [
            min(draw.choice((1, 1, 3, 5, 30)), len(row.tokens) - row.computed) for row in pending
        ]
        outputs = harness.step(list(zip(pending, sizes, strict=True)))
        for row, logits in zip(pending, outputs, strict=True):
            found[rows.index(row)].append(logits)
    for expected, parts in zip(wanted, found, strict=True):
        torch.testing.assert_close(torch.cat(parts), expected, atol=tolerance, rtol=0.0)


HALF = [
    "llama", "qwen2", "qwen3-window", "gpt2", "gemma2", "gemma3", "olmo2", "granite",
    "cohere2-bias", "exaone4", "glm4", "ministral3", "qwen3.5",
]  # fmt: skip


@pytest.mark.parametrize("case", HALF)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Half precision deviates from fp32 about as much as in transformers."""
    oracle = make(tmp_path, case)
    sequences = [prompt + prompt for prompt in prompts_of(2)]
    half = oracle.to(dtype)
    tolerance = 0.3 if dtype is torch.bfloat16 else 0.04
    check_logits(Harness(load(tmp_path, dtype)), logits_of(half, sequences), sequences, tolerance)


def test_longrope_beyond_the_original_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences longer than the original context length; shorter ones differ from transformers on
    purpose."""
    original = {"original_max_position_embeddings": 16}
    changes = {"rope_parameters": {**LONGROPE, **original}, **original}
    monkeypatch.setitem(CASES, "phi3-long", ("Phi3", changes))
    oracle = make(tmp_path, "phi3-long")
    sequences = [prompt + prompt for prompt in prompts_of(3) if len(prompt) > 8]
    check_logits(Harness(load(tmp_path)), logits_of(oracle, sequences), sequences, 1e-4)


def test_long_prompt_is_cut_into_tiles(tmp_path: Path) -> None:
    oracle = make(tmp_path, "llama-mha")
    spec = replace(spec_from_config(load_config(tmp_path)), max_positions=1024)
    model = build_model(spec, device="cpu", dtype=torch.float32)
    load_weights(model, tmp_path)
    draw = random.Random(0)
    sequences = [[draw.randrange(3, 211) for _ in range(600)]]
    harness = Harness(model, block_size=16, num_blocks=64)
    row = harness.add(sequences[0])
    logits = torch.cat(harness.step([(row, 599)]) + harness.step([(row, 1)]))
    with torch.inference_mode():
        expected = oracle(torch.tensor(sequences)).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0.0)
