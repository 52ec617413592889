"""Steps replayed as graphs give the tokens of steps launched kernel by kernel."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from tests.tiny_engine import TINY, TINY_WINDOW, VOCAB

PLAIN = {"max_tokens": 40, "ignore_eos": True}
PARAMS = [
    SamplingParams(temperature=0.0, **PLAIN),  # type: ignore[arg-type]
    SamplingParams(temperature=0.9, seed=1, **PLAIN),  # type: ignore[arg-type]
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, seed=2, **PLAIN),  # type: ignore[arg-type]
    SamplingParams(temperature=0.7, seed=3, stop_token_ids=tuple(range(40, 60)), max_tokens=60),
    SamplingParams(temperature=0.8, seed=4, n=3, **PLAIN),  # type: ignore[arg-type]
]
COSTLY = [
    SamplingParams(temperature=0.8, seed=5, repetition_penalty=1.2, presence_penalty=0.3, **PLAIN),  # type: ignore[arg-type]
    SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=1, **PLAIN),  # type: ignore[arg-type]
    SamplingParams(temperature=0.0, logit_bias={7: 3.0}, min_tokens=5, **PLAIN),  # type: ignore[arg-type]
]


def run(
    folder: Path, params: list[SamplingParams], longest: int = 100, **settings: object
) -> list[list[int]]:
    draw = random.Random(0)
    prompts = [
        [draw.randint(6, VOCAB - 1) for _ in range(draw.randint(1, longest))] for _ in range(24)
    ]
    llm = LLM(
        str(folder),
        device="cuda",
        dtype="float32",
        load_format="dummy",
        skip_tokenizer_init=True,
        max_num_seqs=20,
        **{"max_num_batched_tokens": 300, "num_kv_blocks": 400, **settings},
    )
    outputs = llm.generate(prompts, [params[i % len(params)] for i in range(24)], use_tqdm=False)
    llm.shutdown()
    return [choice.token_ids for output in outputs for choice in output.outputs]


@pytest.mark.parametrize("config", [TINY, TINY_WINDOW], ids=["full", "window"])
@pytest.mark.parametrize("params", [PLAIN, "mixed"], ids=["plain", "mixed"])
def test_graphs_equal_eager(tmp_path: Path, config: dict[str, object], params: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    chosen = PARAMS if params is PLAIN else PARAMS + COSTLY
    eager = run(tmp_path, chosen, enforce_eager=True)
    for settings in ({}, {"steps_in_flight": 3}, {"num_kv_blocks": 60}):
        graphs = run(tmp_path, chosen, **settings)
        same = sum(a == b for a, b in zip(graphs, eager, strict=True))
        # Sums of other lengths round differently, and that may turn a close choice.
        assert same >= 0.9 * len(eager), settings
