"""8-bit KV in a whole engine on a GPU: tokens as on a CPU, and bitwise the same with chunks, copies
and shared blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

import tests.gpu.test_accuracy as accuracy
from quire import LLM, SamplingParams
from quire.ops.triton import launch
from tests.tiny_engine import TINY, model_folder, random_prompts

kinds = pytest.mark.parametrize("kind", ["fp8", "fp8_dynamic", "int8"])


@kinds
@pytest.mark.parametrize("eager", [False, True])
def test_answers_are_those_of_a_cpu(
    kind: str, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A value rounded to three bits may round either way.
    monkeypatch.setattr(accuracy, "CLOSE", 0.35)
    exact = accuracy.answers(device="cpu", dtype="float32", kv_cache_dtype=kind)
    found = accuracy.answers(
        device="cuda", dtype="bfloat16", kv_cache_dtype=kind, enforce_eager=eager
    )
    assert accuracy.agree(found, exact) > 0.5 * 32 * len(exact)


def test_e4m3_on_cards_that_do_not_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "CLOSE", 0.35)
    monkeypatch.setattr(launch, "_cuda_traits", lambda index, pdl: accuracy.OLD_CARD)
    exact = accuracy.answers(device="cpu", dtype="float32", kv_cache_dtype="fp8_dynamic")
    found = accuracy.answers(device="cuda", dtype="float16", kv_cache_dtype="fp8_dynamic")
    assert accuracy.agree(found, exact) > 0.5 * 32 * len(exact)


@kinds
def test_nothing_depends_on_blocks_moving(tmp_path: Path, kind: str) -> None:
    """Chunks, prefix hits, forks and the host tier give the tokens of a run without them."""
    folder = model_folder(tmp_path / "model", TINY | {"hidden_size": 64, "head_dim": 32})
    stems = [p[:48] for p in random_prompts(60, 120, seed=7) if len(p) >= 48][:12]
    params = SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=20, ignore_eos=True)
    found = []
    for settings in (
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 32, "host_cache_gb": 0.01, "num_kv_blocks": 40},
    ):
        llm = LLM(
            str(folder), device="cuda", dtype="bfloat16", load_format="dummy", max_num_seqs=8,
            deterministic=True, skip_tokenizer_init=True, kv_cache_dtype=kind, max_model_len=128,
            **{"num_kv_blocks": 2000, **settings},
        )  # fmt: skip
        rounds = [
            [
                [completion.token_ids for completion in output.outputs]
                for output in llm.generate(
                    [{"prompt_token_ids": stem} for stem in stems], params, use_tqdm=False
                )
            ]
            for _ in range(2)
        ]
        llm.shutdown()
        assert rounds[0] == rounds[1]
        found.append(rounds[0])
    assert found[0] == found[1]
