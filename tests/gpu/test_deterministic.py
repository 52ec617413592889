"""With `deterministic`, a request's log-probabilities are the same to the bit whatever happens
around it; with an optimization switched off, tokens stay what they were."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config import OPTIMIZATIONS
from tests.unit.tiny_engine import TINY, TINY_WINDOW, VOCAB

BIG = {**TINY, "hidden_size": 512, "intermediate_size": 1536, "head_dim": 64, "vocab_size": 2000}
MINE = [
    SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, logprobs=5),
    SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=50, ignore_eos=True, logprobs=5),
]
Answer = list[tuple[int, list[tuple[int, float]]]]


def prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(6, VOCAB) for _ in range(length)]


class Engine:
    def __init__(self, folder: Path, config: dict[str, Any], **settings: Any) -> None:
        (folder / "config.json").write_text(json.dumps(config))
        common = {"num_kv_blocks": 2000, "max_num_seqs": 80, "enable_prefix_caching": False}
        self.llm = LLM(
            str(folder), device="cuda", dtype="bfloat16", load_format="dummy",
            skip_tokenizer_init=True, **{**common, **settings},
        )  # fmt: skip

    def ask(self, mine: SamplingParams, others: int = 0) -> Answer:
        """Tokens and log-probabilities of one request, among others of many lengths."""
        draw = random.Random(others)
        prompts = [prompt(0, 90)] + [
            prompt(i, draw.randrange(1, 150)) for i in range(1, others + 1)
        ]
        rest = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True)
        place = draw.randrange(len(prompts))
        prompts.insert(place, prompts.pop(0))
        params = [mine if i == place else rest for i in range(len(prompts))]
        output = self.llm.generate(prompts, params, use_tqdm=False)[place].outputs[0]
        assert output.logprobs is not None
        return [
            (token, sorted((id, entry.logprob) for id, entry in found.items()))
            for token, found in zip(output.token_ids, output.logprobs, strict=True)
        ]


@pytest.mark.parametrize("config", [BIG, TINY_WINDOW], ids=["full", "window"])
@pytest.mark.parametrize("mine", MINE, ids=["greedy", "sampled"])
def test_deterministic(tmp_path: Path, config: dict[str, Any], mine: SamplingParams) -> None:
    alone = Engine(tmp_path, config, deterministic=True)
    want = alone.ask(mine)
    assert len(want) == 50
    assert alone.ask(mine, others=64) == want
    assert alone.ask(mine, others=5) == want
    alone.llm.shutdown()
    for settings in (
        {"max_num_batched_tokens": 64},
        {"max_num_batched_tokens": 97, "steps_in_flight": 1},
        {"num_kv_blocks": 60, "max_num_seqs": 20},
        {"enforce_eager": True},
        {"enable_prefix_caching": True},
    ):
        engine = Engine(tmp_path, config, deterministic=True, **settings)
        others = 20 if "num_kv_blocks" in settings else 64
        found = [engine.ask(mine, others=others), engine.ask(mine)]
        engine.llm.shutdown()
        assert found == [want, want], settings


@pytest.mark.parametrize("name", OPTIMIZATIONS)
def test_switched_off(tmp_path: Path, name: str) -> None:
    mine = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    prompts = [prompt(i, 10 + 3 * i) for i in range(30)]
    found = []
    for disable in ((), (name,)):
        (tmp_path / "config.json").write_text(json.dumps(TINY))
        llm = LLM(
            str(tmp_path), device="cuda", dtype="float32", load_format="dummy", disable=disable,
            skip_tokenizer_init=True, num_kv_blocks=400,
        )  # fmt: skip
        outputs = llm.generate(prompts, mine, use_tqdm=False)
        llm.shutdown()
        found.append([output.outputs[0].token_ids for output in outputs])
    same = sum(a == b for a, b in zip(*found, strict=True))
    # Sums in another order may turn a close choice.
    assert same >= 27
