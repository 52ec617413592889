"""Models with latent attention: cached latents, formats, and refused options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.errors import ConfigError, ModelError
from quire.layers.latent_attention import LatentAttention, LatentAttentionSpec, LatentProjection
from quire.models import build_model, spec_from_config
from quire.models.kv_scales import head_scales
from tests.models.checkpoints import greedy, make
from tests.models.harness import Harness
from tests.models.quantized_checkpoints import make_quantized
from tests.models.test_families import load
from tests.models.test_parallel import Ranked
from tests.models.test_quantized_checkpoints import loaded, logits
from tests.slow import slow

V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100, "kv_lora_rank": 32,
    "q_lora_rank": 24, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4,
    "topk_group": 2, "moe_intermediate_size": 32,
}  # fmt: skip
V2 = {**V3, "architectures": ["DeepseekV2ForCausalLM"]}
LITE = {**V3, "architectures": ["Glm4MoeLiteForCausalLM"], "n_group": 1, "topk_group": 1}
KIMI_ROPE = {
    "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn",
}  # fmt: skip


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("deepseek")
    return folder, make(folder, "deepseek-v3")


def projection(model: Any, layer: int) -> torch.Tensor:
    attention = model.layers[layer].attention
    assert isinstance(attention, LatentAttention)
    assert isinstance(attention.kv_b, LatentProjection)
    return attention.kv_b.weight


@pytest.mark.parametrize("case", ["fp8-blocks", "w4a16"])
def test_quantized_checkpoints(case: str, tmp_path: Path) -> None:
    exact = make_quantized(tmp_path, case, "deepseek-v3")
    model = loaded(tmp_path)
    wanted = exact["model.layers.1.self_attn.kv_b_proj.weight"]
    whole = projection(model, 1)
    np.testing.assert_allclose(whole.flatten(0, 1).double().numpy(), wanted, rtol=1e-6, atol=1e-7)
    for rank in range(2):
        own = projection(loaded(tmp_path, Ranked(rank, 2)), 1)
        assert torch.equal(own, whole[3 * rank : 3 * rank + 3])
    expected, given = logits(loaded(tmp_path / "exact")), logits(model)
    error = (given - expected).norm() / expected.norm()
    assert error < (0.5 if case == "fp8-blocks" else 1e-5)


def test_rounding_leaves_the_projection_from_latents(deepseek: tuple[Path, Any]) -> None:
    plain, rounded = load(deepseek[0]), loaded(deepseek[0], wanted="int4")
    assert torch.equal(projection(plain, 2), projection(rounded, 2))
    assert rounded.layers[2].attention.out.weight.format.bits == 4


def test_every_rank_keeps_whole_latents(deepseek: tuple[Path, Any]) -> None:
    spec = load(deepseek[0]).spec
    sizes = [
        build_model(spec, device="meta", group=Ranked(rank, world)).kv_groups(16)[0].block_bytes
        for rank, world in ((0, 1), (0, 2), (1, 2))
    ]
    assert sizes == [3 * 16 * (24 + 8) * 4] * 3
    with pytest.raises(ConfigError, match="6 attention heads cannot be split over 4 ranks"):
        build_model(spec, device="meta", group=Ranked(0, 4))


def test_an_engine_that_preempts_and_finds_prefixes(deepseek: tuple[Path, Any]) -> None:
    folder, oracle = deepseek
    prompts = [[5 + i, 17, 99, *range(3, 23 + i)] for i in range(3)]
    expected = [greedy(oracle, prompt, 16) for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    llm = LLM(
        model=str(folder), skip_tokenizer_init=True, device="cpu", num_kv_blocks=14, block_size=4,
        max_model_len=56, max_num_batched_tokens=16,
    )  # fmt: skip
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    for _ in range(2):
        found = llm.generate(given, params, use_tqdm=False)
        assert [list(each.outputs[0].token_ids) for each in found] == expected
    longer = [*prompts[2], *expected[2][:13]]
    (more,) = llm.generate([{"prompt_token_ids": longer}], params, use_tqdm=False)
    assert list(more.outputs[0].token_ids) == greedy(oracle, longer, 16)
    stats = llm.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0


@pytest.mark.parametrize(
    ("kind", "bound", "size"),
    [("fp8_e4m3", 0.1, 24), slow("fp8_dynamic", 0.1, 28), slow("int8", 0.02, 28)],
)
def test_latents_in_8_bits(
    kind: str, bound: float, size: int, deepseek: tuple[Path, Any], tmp_path: Path
) -> None:
    """Logits change only a little, and answers depend neither on chunks nor on cache hits."""
    model = load(deepseek[0])
    scales = head_scales(model, deepseek[0], "auto") if kind == "fp8_e4m3" else None
    assert scales is None or scales.shape == (3, 2, 1)
    found = []
    for name, given in (("auto", None), (kind, scales)):
        harness = Harness(model, kv_cache_dtype=name, head_scales=given)
        row = harness.add([5, 17, 99, 4, 31, 8, 7, 42, 3, 9, 11, 2])
        found.append(torch.cat([harness.step([(row, 4)])[0] for _ in range(3)]))
    # Latents of 24 numbers, a scale, and keys of 8 as they are.
    assert harness.groups[0].block_bytes == 3 * 4 * (size + 8 * 4)
    error = (found[1] - found[0]).norm() / found[0].norm()
    assert 0.0 < error < bound
    prompts = [[5 + i, 17, 99, *range(3, 23 + i)] for i in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    answers = []
    for budget, blocks in ((64, 60), (7, 14)):
        llm = LLM(
            model=str(deepseek[0]), skip_tokenizer_init=True, device="cpu", num_kv_blocks=blocks,
            block_size=4, max_model_len=56, max_num_batched_tokens=budget, kv_cache_dtype=kind,
        )  # fmt: skip
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        for _ in range(2):
            outputs = llm.generate(given, params, use_tqdm=False)
            answers.append([each.outputs[0].token_ids for each in outputs])
        assert budget == 7 or llm.stats().prefix_hit_tokens > 0
        llm.shutdown()
    assert all(answer == answers[0] for answer in answers)


def test_the_draft_layer_is_skipped(deepseek: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = deepseek
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    more = {"model.layers.61.eh_proj.weight": torch.zeros(2)}
    save_file(tensors | more, tmp_path / "model.safetensors")
    assert torch.equal(logits(load(tmp_path)), logits(load(folder)))
    more = {"model.layers.5.eh_proj.weight": torch.zeros(2)}
    save_file(tensors | more, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"unexpected tensor model.layers.5.eh_proj"):
        load(tmp_path)


def test_scores_of_extended_positions() -> None:
    published = {**V3, "rope_scaling": KIMI_ROPE, "max_position_embeddings": 131072}
    spec = spec_from_config(published)
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, LatentAttentionSpec)
    assert mixer.scale == pytest.approx(192**-0.5 * 1.3465735902799727**2)
    assert spec.max_positions == 131072
    assert (mixer.width, mixer.query_dim, mixer.rope.interleaved) == (96, 192, True)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**V3, "topk_method": "greedy"}, "topk_method='greedy' is not supported"),
        ({**V3, "scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        ({**V3, "moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
        ({**V3, "n_group": 3}, "2 of 8 experts cannot be in 2 of 3 groups"),
        (
            {**V3, "q_lora_rank": None, "attention_bias": True},
            "attention_bias=True is not supported without q_lora_rank",
        ),
        ({**V3, "qk_rope_head_dim": 7}, "cannot rotate 7 of 7 dimensions"),
        ({**V3, "index_topk": 2048}, "index_topk=2048 is not supported"),
        ({**V2, "topk_method": "group_limited_greedy"}, "topk_method='group_limited_greedy'"),
        ({**V2, "norm_topk_prob": True}, "norm_topk_prob=True is not supported"),
        ({**LITE, "mlp_layer_types": ["sparse"]}, "mlp_layer_types must give each of 2 layers"),
    ],
)
def test_unsupported_options_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        spec_from_config(config)


def test_drafts_work_with_latents_in_eight_bits(deepseek: tuple[Path, Any]) -> None:
    """Costs are measured with steps without rows, which have no latents to dequantize."""
    found = []
    for settings in ({}, {"speculative": {"method": "suffix", "lookup_min": 1}}):
        llm = LLM(
            str(deepseek[0]), skip_tokenizer_init=True, kv_cache_dtype="int8", num_kv_blocks=40,
            max_model_len=128, max_num_seqs=2, **settings,
        )  # fmt: skip
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        prompt = {"prompt_token_ids": [5, 6, 7, 5, 6, 7, 5]}
        found.append(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids)
        llm.shutdown()
    assert found[0] == found[1]
