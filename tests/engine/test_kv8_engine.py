"""8-bit KV in a whole engine, on a CPU: answers, prefixes, tiers, copies, settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.config import EngineArgs
from quire.engine.builder import resolve
from quire.errors import ConfigError, ModelError
from quire.models import (
    build_model,
    load_config,
    load_weights,
    model_quantization,
    spec_from_config,
)
from quire.models.kv_scales import head_scales
from quire.quantization import Unquantized
from tests.models.checkpoints import make
from tests.models.harness import Harness
from tests.models.test_parallel import Ranked
from tests.slow import slow
from tests.tiny_engine import TINY, TINY_WINDOW, model_folder, random_prompts

KINDS = ["fp8", "fp8_dynamic", "int8"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
kinds = pytest.mark.parametrize("kind", KINDS)


def engine(folder: Path, kind: str, **settings: Any) -> LLM:
    given: dict[str, Any] = {
        "load_format": "dummy",
        "device": "cpu",
        "block_size": 8,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "num_kv_blocks": 100,
        "skip_tokenizer_init": True,
        "kv_cache_dtype": kind,
    }
    return LLM(str(folder), **given | settings)


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [
        completion.token_ids
        for output in llm.generate(given, params, use_tqdm=False)
        for completion in output.outputs
    ]


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        *((TINY, kind) for kind in KINDS),
        *(slow(TINY_WINDOW, kind) for kind in KINDS[:2]),
        (TINY_WINDOW, KINDS[2]),
    ],
    ids=[f"{name}-{kind}" for name in ("full", "window") for kind in KINDS],
)
def test_answers_do_not_depend_on_company_chunks_or_prefixes(
    tmp_path: Path, kind: str, config: dict[str, object]
) -> None:
    folder = model_folder(tmp_path / "model", config)
    shared = random_prompts(1, 61, seed=9)[0]
    prompts = random_prompts(4, seed=3) + [shared + tail for tail in random_prompts(3, 9, seed=4)]
    lone = engine(folder, kind, enable_prefix_caching=False)
    expected = [answers(lone, [prompt])[0] for prompt in prompts]
    lone.shutdown()
    together = engine(folder, kind, max_num_batched_tokens=16)
    assert answers(together, prompts) == expected
    assert answers(together, prompts) == expected
    assert together.stats().prefix_hit_tokens > 0
    together.shutdown()


@kinds
def test_completions_part_from_a_shared_block(tmp_path: Path, kind: str) -> None:
    """Scales are copied with their block; otherwise children would misread the parent's bytes."""
    folder = model_folder(tmp_path / "model", TINY)
    prompt = random_prompts(1, 61, seed=2)[0][:21]
    params = SamplingParams(temperature=1.0, max_tokens=12, n=3, ignore_eos=True, seed=4)
    found = []
    for prefixes in (True, False):
        llm = engine(folder, kind, enable_prefix_caching=prefixes)
        found.append(answers(llm, [prompt], params))
        llm.shutdown()
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens in found[0]}) == 3


@pytest.mark.parametrize("kind", [slow("fp8"), "fp8_dynamic", slow("int8")])
def test_blocks_come_back_from_lower_tiers(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "quire.features.kv_offload.costs.CostModel.fetch_pays", lambda self, *_: True
    )
    monkeypatch.setattr("quire.features.kv_offload.costs.CostModel.worth_keeping", True)
    folder = model_folder(tmp_path / "model", TINY)
    prompts = [prompt[:56] for prompt in random_prompts(60, 120, seed=7) if len(prompt) >= 56][:6]
    plain = engine(folder, kind, enable_prefix_caching=False)
    expected = [answers(plain, [prompt])[0] for prompt in prompts]
    plain.shutdown()
    host = {"num_kv_blocks": 24, "host_cache_gb": 4e-4, "disk_cache": str(tmp_path / "kv")}
    for source in ("host", "disk"):
        llm = engine(folder, kind, **host)  # the second finds the first one's files
        for _ in range(2):
            assert [answers(llm, [prompt])[0] for prompt in prompts] == expected
        stats = llm.stats().tiers
        llm.shutdown()
        assert stats is not None
        assert stats.transfer_failures == 0
        assert getattr(stats, f"{source}_hit_tokens") > 0


def test_files_of_another_kind_are_not_read(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", TINY)
    prompts = [prompt[:56] for prompt in random_prompts(60, 120, seed=7) if len(prompt) >= 56][:6]
    tiers = {"num_kv_blocks": 24, "host_cache_gb": 4e-5, "disk_cache": str(tmp_path / "kv")}
    for kind in ("auto", *KINDS):
        llm = engine(folder, kind, **tiers)
        answers(llm, prompts)
        stats = llm.stats().tiers
        llm.shutdown()
        assert stats is not None
        assert stats.disk_hit_tokens == 0
    assert sum(path.is_dir() for path in (tmp_path / "kv").iterdir()) == 4


@kinds
def test_a_trained_models_answers_stay_close(kind: str) -> None:
    """With the embedded model, log-probabilities change only a little."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    text = (
        "Once upon a time, there was a little girl named Lily. She liked to play in the park. " * 3
    )
    found = []
    for name in ("auto", kind):
        llm = LLM(device="cpu", kv_cache_dtype=name, num_kv_blocks=40, max_num_batched_tokens=16)
        (output,) = llm.generate([text], params, use_tqdm=False)
        llm.shutdown()
        assert output.prompt_logprobs is not None
        ids = output.prompt_token_ids
        found.append(
            torch.tensor([
                entry[token].logprob
                for token, entry in zip(ids, output.prompt_logprobs, strict=True)
                if entry is not None
            ])
        )  # fmt: skip
    difference = (found[0] - found[1]).abs()
    assert 0.0 < difference.mean() < 0.03
    assert difference.max() < 0.3


def test_blocks_have_the_size_the_budget_assumes(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", TINY)
    sizes = {}
    for kind in ("auto", *KINDS):
        llm = engine(folder, kind, num_kv_blocks=None, kv_cache_gb=1e-3, max_num_seqs=64)
        sizes[kind] = llm.stats().blocks_total[0]
        llm.shutdown()
    # 16 values of a head: 64 bytes as they are, 16 in 8 bits, 4 for a scale.
    per_block = 3 * 2 * 2 * 8
    for kind, width in {"auto": 64, "fp8": 16, "fp8_dynamic": 20, "int8": 20}.items():
        assert sizes[kind] == min(1_000_000 // (per_block * width), 64 * 128 // 8)


# -- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp8_e5m2", "int4", "", "FP8"])
def test_unknown_kinds_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype must be one of auto, .*fp8_dynamic"):
        EngineArgs(kv_cache_dtype=name)


def test_kv_cache_dtype_resolves_by_device_and_dtype(tmp_path: Path) -> None:
    folder = str(model_folder(tmp_path / "model", TINY))

    def resolved(**settings: Any) -> object:
        args = EngineArgs(model=folder, device="cpu", skip_tokenizer_init=True, **settings)
        return resolve(args).kv_cache_dtype

    assert resolved() == "float32"
    assert resolved(dtype="bfloat16") == "bfloat16"
    assert resolved(kv_cache_dtype="float32") == "float32"
    assert resolved(kv_cache_dtype="fp8") == "fp8_e4m3"
    assert resolved(kv_cache_dtype="int8") == "int8"
    with pytest.raises(ConfigError, match="the model computes in float32"):
        resolved(kv_cache_dtype="bfloat16")


def test_heads_of_an_odd_size_are_refused(tmp_path: Path) -> None:
    config = TINY | {"head_dim": 15, "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    config |= {"n_embd": 30, "n_head": 2, "n_layer": 1, "n_positions": 64}
    folder = str(model_folder(tmp_path / "model", config))
    with pytest.raises(ConfigError, match="an even head size"):
        resolve(EngineArgs(model=folder, device="cpu", kv_cache_dtype="int8",
                           skip_tokenizer_init=True))  # fmt: skip


# -- scales of the checkpoint --------------------------------------------------------------------


def with_scales(folder: Path, name: str, value: torch.Tensor, layers: int = 3) -> None:
    """Adds scales to a checkpoint; `name` with {layer} and {kind} in it."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for layer in range(layers):
        for kind in "kv":
            tensors[name.format(layer=layer, kind=kind)] = value * (layer + 1) * (1 + (kind == "v"))
    save_file(tensors, file)


def layers_of(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["num_hidden_layers"])


NAMES = [
    "model.layers.{layer}.self_attn.{kind}_scale",
    "model.layers.{layer}.self_attn.attn.{kind}_scale",
    "model.layers.{layer}.self_attn.{kind}_proj.{kind}_scale",
    "model.layers.{layer}.self_attn.{kind}_proj.output_scale",
]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (name, shape) if name == NAMES[0] or shape == (2,) else slow(name, shape)
        for name in NAMES
        for shape in [(), (1,), (2,), (2, 1, 1)]
    ],
)
def test_scales_of_the_checkpoint(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    make(tmp_path, "llama")
    layers = layers_of(tmp_path)
    value = torch.full(shape, 0.25)
    if value.numel() == 2:
        value.view(-1)[1] = 0.5
    with_scales(tmp_path, name, value, layers)
    spec = spec_from_config(load_config(tmp_path))
    assert spec.attention[0].kv_heads == 2
    model = build_model(spec, device="cpu", dtype=torch.float32)
    load_weights(model, tmp_path)
    found = head_scales(model, tmp_path, "auto")
    want = value.flatten().expand(2) * torch.tensor([[[1.0], [2.0]]])
    want = torch.stack([want[0] * (layer + 1) for layer in range(layers)])
    assert torch.equal(found, want)
    half = build_model(spec, device="cpu", dtype=torch.float32, group=Ranked(1, 2))
    assert torch.equal(head_scales(half, tmp_path, "auto"), want[:, :, 1:])
    exact = logits(Harness(model))
    near = logits(Harness(model, kv_cache_dtype="fp8_e4m3", head_scales=found * 0.1))
    cut = logits(Harness(model, kv_cache_dtype="fp8_e4m3", head_scales=found * 1e-6))
    assert 0 < (near - exact).norm() < 0.3 * (cut - exact).norm()


def logits(harness: Harness) -> torch.Tensor:
    """Returns the logits of a prompt in two chunks."""
    row = harness.add([5, 17, 99, 4, 31, 8, 7, 42])
    return torch.cat([harness.step([(row, 4)])[0] for _ in range(2)])


def test_no_scales_are_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, "llama")
    model = build_model(spec_from_config(load_config(tmp_path)), device="cpu")
    assert torch.equal(head_scales(model, tmp_path, "auto"), torch.ones(layers_of(tmp_path), 2, 2))
    assert "no scales" in caplog.text


@pytest.mark.parametrize(
    ("value", "layers", "error"),
    [
        (torch.ones(3), None, "expected one float, or 2"),
        (torch.tensor(0.0), None, "positive finite scales"),
        (torch.tensor(float("nan")), None, "positive finite scales"),
        (torch.tensor(1, dtype=torch.int8), None, "expected one float"),
        (torch.tensor(1.0), 1, "k_scale of layer 1 is missing"),
        (torch.tensor(1.0), 9, "config.json does not have"),
    ],
)
def test_invalid_kv_scales_are_refused(
    tmp_path: Path, value: torch.Tensor, layers: int | None, error: str
) -> None:
    make(tmp_path, "llama")
    with_scales(tmp_path, NAMES[0], value, layers or layers_of(tmp_path))
    model = build_model(spec_from_config(load_config(tmp_path)), device="cpu")
    with pytest.raises(ModelError, match=error):
        head_scales(model, tmp_path, "auto")


def test_a_checkpoint_whose_kv_alone_is_quantized(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    config = load_config(tmp_path)
    scheme = {"type": "float", "num_bits": 8, "dynamic": False}
    only_kv = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme, "config_groups": {}}
    spec = spec_from_config(config)
    own = config | {"quantization_config": only_kv}
    assert type(model_quantization(tmp_path, own, spec)) is Unquantized
    weights = only_kv | {"format": "float-quantized", "config_groups": {"group_0": {}}}
    with pytest.raises(ModelError, match="'group_0' has no weights"):
        model_quantization(tmp_path, config | {"quantization_config": weights}, spec)
