"""Outputs for trainers on a GPU: how tokens were drawn, and their experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from tests.models.checkpoints import make

PROMPTS = [list(range(20 + i, 60 + 2 * i)) for i in range(4)]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_outputs(tmp_path: Path, mode: Any) -> None:
    oracle = make(tmp_path, "mixtral")
    llm = LLM(
        str(tmp_path), skip_tokenizer_init=True, device="cuda", dtype="float32", max_num_seqs=4,
        max_model_len=128, kv_cache_gb=0.2, enable_return_routed_experts=True, logprobs_mode=mode,
    )  # fmt: skip
    params = SamplingParams(
        temperature=0.9, top_k=6, top_p=0.9, max_tokens=20, seed=3, ignore_eos=True,
        return_routed_experts=True, return_sampling_info=True, logprobs=2,
    )  # fmt: skip
    for output in llm.generate(PROMPTS, params, False):
        (completion,) = output.outputs
        text = output.prompt_token_ids + completion.token_ids
        with torch.inference_mode():
            found = oracle(torch.tensor([text]), output_router_logits=True)
        chosen = [each.topk(2).indices.sort(-1).values for each in found.router_logits]
        expected = torch.stack(chosen, 1).numpy()[:-1]
        assert completion.routed_experts is not None
        same = (np.sort(completion.routed_experts, -1) == expected).all(-1).mean()
        assert same > 0.98  # Scores may be closer to each other than two devices' sums.
        info, tokens = completion.sampling_info, torch.tensor(completion.token_ids)
        assert info is not None
        x = found.logits[0, len(output.prompt_token_ids) - 1 : -1].float()
        raw = x.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        np.testing.assert_allclose(info.raw_logprobs, raw, atol=5e-3)
        assert (info.processed_logprobs >= info.raw_logprobs - 1e-4).all()
        assert 1 <= info.mask_sizes.min() <= info.mask_sizes.max() <= 6
    llm.shutdown()
