"""Experts in few bits, in all layouts of checkpoints: read exactly and sliced for ranks."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.errors import ModelError
from quire.layers.expert_weights import ExpertLinear
from quire.layers.experts import Experts
from quire.models import Decoder, build_model, load_config, load_weights, spec_from_config
from quire.ops.reference.quantized import dequantize
from tests.models.checkpoints import greedy, make
from tests.models.harness import Harness
from tests.models.quantized_checkpoints import make_quantized
from tests.models.test_families import check_logits, load, logits_of, prompts_of
from tests.models.test_parallel import Ranked
from tests.models.test_quantized_checkpoints import ROUNDS_INPUTS, loaded, logits

CASES = ["gptq", "awq", "w4a16-asym", "w8a16", "w8a8", "mxfp4", "fp8-blocks", "fp8-static"]
_STEMS = {"gate": "gate_proj", "up": "up_proj", "": "down_proj"}


def experts_of(model: Decoder, layer: int) -> dict[str, Tensor]:
    """Returns the weights of a layer's experts in float64, by their names in the checkpoint."""
    part = model.layers[layer].mlp
    assert isinstance(part, Experts)
    found = {}
    for linear in (part.up, part.down):
        assert isinstance(linear, ExpertLinear)
        whole = dequantize(linear.weight, torch.float64).split(linear.size)
        for index, own in enumerate(whole):
            expert, place = divmod(index, len(linear.names))
            name = f"{linear.shard.experts[0] + expert}.{_STEMS[linear.names[place]]}.weight"
            found[f"model.layers.{layer}.mlp.experts.{name}"] = own
    return found


@pytest.mark.parametrize("case", CASES)
def test_weights_equal_those_of_the_original_layout(case: str, tmp_path: Path) -> None:
    exact = make_quantized(tmp_path, case, "qwen3-moe")
    model = loaded(tmp_path)
    for name, found in experts_of(model, 1).items():
        np.testing.assert_allclose(found.numpy(), exact[name], rtol=1e-6, atol=1e-9)
    expected, given = logits(loaded(tmp_path / "exact")), logits(model)
    error = (given - expected).norm() / expected.norm()
    assert error < (0.5 if case in ROUNDS_INPUTS else 1e-5)
    for rank in range(2):
        for name, found in experts_of(loaded(tmp_path, Ranked(rank, 2)), 2).items():
            low, high = [(0, 32), (32, 40)][rank]
            if case in ("w8a16", "w8a8", "fp8-static"):
                low, high = [(0, 16), (16, 40)][rank]
            own = exact[name][:, low:high] if "down" in name else exact[name][low:high]
            np.testing.assert_allclose(found.numpy(), own, rtol=1e-6, atol=1e-9)
        whole = experts_of(loaded(tmp_path, Ranked(rank, 2), expert_parallel=True), 2)
        assert len(whole) == 3 * [4, 5][rank]
        for name, found in whole.items():
            np.testing.assert_allclose(found.numpy(), exact[name], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("rank", [0, 1])
def test_tokens_are_spread_over_the_experts_of_all_ranks(tmp_path: Path, rank: int) -> None:
    make_quantized(tmp_path, "mxfp4", "qwen3-moe")
    part = loaded(tmp_path, Ranked(rank, 2), expert_parallel=True).layers[1].mlp
    assert isinstance(part, Experts)
    total = part.spec.experts
    assert part.up.count < total
    assert part.up.weights.total == part.down.weights.total == total
    assert part.up.expanded_bytes(96 * total) == 0 < part.up.expanded_bytes(96 * total + 1)
    for experts in (part.up, part.down):
        experts.grow(1)
        assert experts.weights.total == total + 2  # the other rank has one more, too


def test_memory_of_expanded_weights(tmp_path: Path) -> None:
    make_quantized(tmp_path, "mxfp4", "qwen3-moe")
    part = loaded(tmp_path).layers[1].mlp
    assert isinstance(part, Experts)
    many = 96 * part.up.count // part.spec.routing.top_k + 1
    up, down = (2 * own.weight.outputs * own.weight.inputs for own in (part.up, part.down))
    rows = many * part.spec.routing.top_k
    assert part.up.expanded_bytes(rows) == up
    assert part.down.expanded_bytes(rows) == down
    assert part.up.expanded_bytes(96 * part.up.count) == 0
    assert part.workspace_bytes(many) - part.workspace_bytes(many - 1) > max(up, down)


def test_experts_quantized_in_different_ways_are_refused(tmp_path: Path) -> None:
    make_quantized(tmp_path, "w4a16", "qwen3-moe")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["ignore"] = ["lm_head", "model.layers.1.mlp.experts.4.up_proj"]
    file.write_text(json.dumps(config))
    with pytest.raises(
        ModelError, match=r"layers.1.mlp.up.4.up and layers.1.mlp.up.0.gate are .* \(values: "
    ):
        loaded(tmp_path)


def test_act_order_is_refused(tmp_path: Path) -> None:
    make_quantized(tmp_path, "w4a16-group-order", "qwen3-moe")
    with pytest.raises(ModelError, match="act order is not supported for experts"):
        loaded(tmp_path)


@pytest.mark.parametrize("kind", ["fp8", "int4", "int8", "w8a8"])
def test_rounded_while_they_are_read(kind: str, tmp_path: Path) -> None:
    make(tmp_path, "gpt-oss")
    plain, rounded = load(tmp_path), loaded(tmp_path, wanted=kind)
    for name, exact in experts_of(plain, 0).items():
        error = (experts_of(rounded, 0)[name] - exact).norm() / exact.norm()
        assert 0 < error < (0.2 if kind == "int4" else 0.05)


def test_fused_tensors_are_the_same_experts(tmp_path: Path) -> None:
    make(tmp_path, "qwen3-moe")
    separate = load(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    fused: dict[str, list[Tensor]] = {}
    for name in sorted(tensors, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]):
        if found := re.fullmatch(r"(.+\.experts)\.\d+\.(gate|up|down)_proj\.weight", name):
            prefix, stem = found.groups()
            fused.setdefault(f"{prefix}.{stem}", []).append(tensors.pop(name))
    for name in [name for name in fused if name.endswith(".gate")]:
        prefix = name.removesuffix(".gate")
        both = zip(fused[name], fused[f"{prefix}.up"], strict=True)
        tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in both])
        tensors[f"{prefix}.down_proj"] = torch.stack(fused[f"{prefix}.down"])
    save_file(tensors, file)
    spec = spec_from_config(load_config(tmp_path))
    layers = tuple(replace(x, ffn=replace(x.ffn, layout="fused")) for x in spec.layers)  # type: ignore[type-var]
    spec = replace(spec, layers=layers)
    for rank, world in ((0, 1), (0, 2), (1, 2)):
        model = build_model(spec, device="cpu", dtype=torch.float32, group=Ranked(rank, world))
        load_weights(model, tmp_path)
        low, high = [(0, 40), (0, 16), (16, 40)][rank + world - 1]
        for name, found in experts_of(model, 2).items():
            own = experts_of(separate, 2)[name]
            own = own[:, low:high] if "down" in name else own[low:high]
            assert torch.equal(found, own)


def make_mxfp4(folder: Path) -> Any:
    """Saves a gpt-oss with random blocks and scales; returns the weights that transformers
    reads."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    oracle = make(folder, "gpt-oss")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(3)
    for index, layer in enumerate(oracle.model.layers):
        for stem, outputs, inputs in (("gate_up_proj", 128, 64), ("down_proj", 64, 64)):
            name = f"model.layers.{index}.mlp.experts.{stem}"
            blocks = torch.randint(0, 256, (6, outputs, inputs // 32, 16), generator=generator)
            scales = torch.randint(121, 125, (6, outputs, inputs // 32), generator=generator)
            del tensors[name]
            tensors[f"{name}_blocks"] = blocks.to(torch.uint8)
            tensors[f"{name}_scales"] = scales.to(torch.uint8)
            exact = convert_moe_packed_tensors(
                blocks.to(torch.uint8), scales.to(torch.uint8), dtype=torch.float32
            )
            getattr(layer.mlp.experts, stem).data.copy_(exact)
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return oracle


def test_gpt_oss_as_it_is_published(tmp_path: Path) -> None:
    pytest.importorskip("transformers.integrations.mxfp4")
    oracle = make_mxfp4(tmp_path)
    model = loaded(tmp_path)
    assert model.layers[0].mlp.up.weight.format.key == "e2m1-g32"
    prompts = prompts_of(1)
    expected = [greedy(oracle, prompt, 24) for prompt in prompts]
    assert Harness(model, padding=2).generate(prompts, 24, chunk=7) == expected
    sequences = [prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]
    check_logits(Harness(model), logits_of(oracle, sequences), sequences, 1e-4)
    whole = dequantize(model.layers[1].mlp.down.weight, torch.float64).view(6, 64, 64)
    for rank in range(2):
        own = loaded(tmp_path, Ranked(rank, 2)).layers[1].mlp.down.weight
        found = dequantize(own, torch.float64).view(6, 64, 32)
        assert torch.equal(found, whole[:, :, 32 * rank : 32 * rank + 32])


def test_random_blocks_deviate_as_random_floats_do(tmp_path: Path) -> None:
    pytest.importorskip("transformers.integrations.mxfp4")
    make_mxfp4(tmp_path)
    model = loaded(tmp_path, load_format="dummy")
    found = dequantize(model.layers[0].mlp.up.weight, torch.float64)
    assert 0.015 < float(found.std()) < 0.03
