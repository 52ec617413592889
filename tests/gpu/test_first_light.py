"""The GPU gives the tokens of the fp32 CPU reference wherever rounding cannot decide."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.models import resolve_model_path

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 10,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}


@pytest.fixture(scope="module")
def qwen3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3-0.6b")
    (folder / "config.json").write_text(json.dumps(QWEN3_06B))
    return folder


def _llm(folder: Path, device: str, dtype: str) -> LLM:
    return LLM(
        str(folder),
        device=device,
        dtype=dtype,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=16,
        kv_cache_gb=1.0 if device == "cpu" else None,
        enable_prefix_caching=False,
    )


def test_qwen3_shape_equals_the_fp32_reference(qwen3_folder: Path) -> None:
    draw = random.Random(0)
    prompts = [[draw.randint(0, 10000) for _ in range(draw.randint(8, 200))] for _ in range(8)]
    greedy = SamplingParams(
        temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=2, detokenize=False
    )
    cpu = _llm(qwen3_folder, "cpu", "float32")
    expected = [output.outputs[0] for output in cpu.generate(prompts, greedy, use_tqdm=False)]
    cpu.shutdown()

    gpu = _llm(qwen3_folder, "cuda", "bfloat16")
    free_running = gpu.generate(prompts, greedy, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == 32 for output in free_running)

    # Teacher-forced on the reference's tokens, so that every position is compared.
    forced = gpu.generate(
        [prompt + answer.token_ids for prompt, answer in zip(prompts, expected, strict=True)],
        SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False),
        use_tqdm=False,
    )
    gpu.shutdown()

    margins, errors, ranks = [], [], []
    for prompt, answer, output in zip(prompts, expected, forced, strict=True):
        assert output.prompt_logprobs is not None
        assert answer.logprobs is not None
        given = output.prompt_logprobs[len(prompt) :]
        for token, reference, seen in zip(answer.token_ids, answer.logprobs, given, strict=True):
            best, second = sorted((entry.logprob for entry in reference.values()), reverse=True)[:2]
            assert seen is not None
            margins.append(best - second)
            errors.append(abs(seen[token].logprob - best))
            ranks.append(seen[token].rank)
    error = max(errors)
    assert error < 0.5
    decided = [rank for rank, margin in zip(ranks, margins, strict=True) if margin > 2 * error]
    assert len(decided) >= 1
    assert all(rank == 1 for rank in decided)
    agreement = sum(rank == 1 for rank in ranks) / len(ranks)
    assert agreement > 0.8


def test_embedded_model_answers_as_transformers_does() -> None:
    transformers = pytest.importorskip("transformers")
    folder = resolve_model_path(None)
    questions = ["Hello!", "Tell me a story about a cat.", "Who are you?", "What do you like?"]
    llm = LLM(device="cuda", dtype="bfloat16", max_num_seqs=8)
    outputs = llm.chat(
        [[{"role": "user", "content": text}] for text in questions],
        SamplingParams(temperature=0.0, max_tokens=100),
        use_tqdm=False,
    )
    llm.shutdown()

    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    oracle.to("cuda").eval()
    compared = 0
    for output in outputs:
        answer = output.outputs[0].token_ids
        ids = torch.tensor([output.prompt_token_ids + answer], device="cuda")
        with torch.inference_mode():
            logits = oracle(ids).logits[0, len(output.prompt_token_ids) - 1 : -1].float()
        top = logits.topk(2, dim=-1)
        clear = (top.values[:, 0] - top.values[:, 1]) > 0.1
        ours = torch.tensor(answer, device="cuda")
        assert torch.equal(top.indices[clear, 0], ours[clear])
        compared += int(clear.sum())
    assert compared > 20
