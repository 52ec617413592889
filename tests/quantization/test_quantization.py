"""Quantized layers: stacked, sharded, loaded and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM
from quire.config import EngineArgs
from quire.errors import ConfigError, ModelError
from quire.layers.build import Build
from quire.layers.linear import Linear, Output
from quire.layers.norm import NormSpec
from quire.layers.parameter_slice import ParameterSlice
from quire.models import (
    Decoder,
    build_model,
    load_config,
    load_weights,
    resolve_model_path,
    spec_from_config,
)
from quire.ops import Weight, WeightFormat
from quire.ops.reference.quantized import dequantize
from quire.parallel import ProcessGroup, SingleGroup
from quire.quantization import CheckpointTensor, Quantization, Scheme, Unquantized, quantization_of
from tests.gloo_ranks import on_ranks
from tests.models.checkpoints import make
from tests.models.harness import Harness

CPU = torch.device("cpu")
FP8 = WeightFormat(torch.float8_e4m3fn, scales=torch.float32)
BLOCKS = WeightFormat(torch.float8_e4m3fn, scales=torch.float32, group=32)


class Share(SingleGroup):
    """A group that only reports its size, to build one rank's part; it sums and gathers nothing."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world


class PerTensor(Unquantized):
    """FP8 with one scale per projection, as checkpoints have it."""

    def scheme_for(self, projection: str, dtype: torch.dtype) -> Scheme:
        return Scheme(
            FP8,
            (
                CheckpointTensor("weight", "values", frozenset({torch.float8_e4m3fn})),
                CheckpointTensor("weight_scale", "scales", frozenset({torch.float32}), None, None),
            ),
        )


class Blocks(Unquantized):
    """FP8 with a scale for each 32 x 32 weights."""

    def scheme_for(self, projection: str, dtype: torch.dtype) -> Scheme:
        return Scheme(
            BLOCKS,
            (
                CheckpointTensor("weight", "values", frozenset({torch.float8_e4m3fn})),
                CheckpointTensor("weight_scale_inv", "scales", frozenset({torch.float32}), 32, 32),
            ),
        )


def build(quantization: Quantization, group: ProcessGroup | None = None) -> Build:
    return Build(group or SingleGroup(), quantization, CPU, torch.float32, "layer")


def fill(layer: Linear, tensors: dict[str, Tensor], rows: int = 7) -> None:
    """Writes whole tensors, by the names of their slices, a few rows at a time."""
    for part in layer.slices():
        whole = tensors[part.name]
        assert tuple(whole.shape) == part.shape
        assert whole.dtype in part.dtypes
        own = whole[tuple(slice(low, high) for low, high in part.ranges)]
        own = own.unsqueeze(0) if not own.ndim else own
        for start in range(0, len(own), rows):
            part.write(own[start : start + rows], start)
    layer.finish()


def test_each_stacked_output_keeps_its_own_scale() -> None:
    outputs = [Output("q", 8), Output("k", 4), Output("v", 4)]
    scales = {"q": 0.5, "k": 3.0, "v": 20.0}
    tensors = {}
    expected = []
    for output in outputs:
        values = torch.randn(output.size, 16).to(torch.float8_e4m3fn)
        tensors[f"{output.name}.weight"] = values
        tensors[f"{output.name}.weight_scale"] = torch.tensor(scales[output.name])
        expected.append(values.float() * scales[output.name])
    for rank, world in ((0, 1), (0, 2), (1, 2)):
        group = Share(rank, world)
        layer = Linear(16, outputs, build(PerTensor(), group), bias=False, split="outputs")
        fill(layer, tensors)
        own = torch.cat([whole.chunk(world)[rank] for whole in expected])
        torch.testing.assert_close(dequantize(layer.weight, torch.float32), own)


@pytest.mark.parametrize("split", ["outputs", "inputs"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_block_of_scales_may_be_cut_anywhere(split: Any, world: int) -> None:
    """Two stacked outputs and the inputs are not multiples of a block; ranks have 36, 24 or 18 of
    72 inputs."""
    outputs = [Output("gate", 72), Output("up", 72)] if split == "outputs" else [Output("", 72)]
    tensors, expected = {}, []
    for output in outputs:
        prefix = f"{output.name}." if output.name else ""
        values = torch.randn(72, 72).to(torch.float8_e4m3fn)
        scales = torch.rand(3, 3) + 0.5
        tensors |= {f"{prefix}weight": values, f"{prefix}weight_scale_inv": scales}
        wide = scales.repeat_interleave(32, 0).repeat_interleave(32, 1)[:72, :72]
        expected.append(values.float() * wide)
    for rank in range(world):
        group = Share(rank, world)
        layer = Linear(72, outputs, build(Blocks(), group), bias=False, split=split)
        fill(layer, tensors, rows=1 if rank else 72)
        dim = 0 if split == "outputs" else 1
        own = torch.cat([whole.chunk(world, dim)[rank] for whole in expected])
        torch.testing.assert_close(dequantize(layer.weight, torch.float32), own)


@pytest.mark.parametrize("world", [1, 2])
def test_a_row_parallel_layer_takes_no_norm_and_no_activation(world: int) -> None:
    made = build(Unquantized(), Share(0, world))
    layer = Linear(16, 8, made, bias=False, split="inputs")
    x = torch.zeros(2, 16 // world)
    with pytest.raises(ConfigError, match=r"layer: .* takes no norm"):
        layer(x, norm=NormSpec(kind="rms", eps=1e-6).layer(16 // world, made))
    with pytest.raises(ConfigError, match=r"layer: .* takes no activation"):
        layer(x, act="gelu")


def test_slices_of_floats_are_stored_as_they_are() -> None:
    target = torch.zeros(3, 2)
    part = ParameterSlice.for_tensor("weight", target, (6, 2), ((3, 6), (0, 2)))
    part.write(torch.ones(1, 2), 1)
    assert target.tolist() == [[0, 0], [1, 1], [0, 0]]


def loaded(folder: Path, quantization: Quantization, group: ProcessGroup | None = None) -> Decoder:
    spec = spec_from_config(load_config(folder))
    model = build_model(
        spec, device="cpu", dtype=torch.float32, group=group, quantization=quantization
    )
    load_weights(model, folder)
    return model


@pytest.mark.parametrize("case", ["qwen3", "gpt2", "llama-mqa-tied"])
def test_int8_rounds_to_the_nearest_of_its_output(case: str, tmp_path: Path) -> None:
    make(tmp_path, case)
    plain, rounded = loaded(tmp_path, Unquantized()), loaded(tmp_path, quantization_of("int8"))
    count = 0
    for a, b in zip(plain.modules(), rounded.modules(), strict=True):
        if not isinstance(a, Linear) or not isinstance(b, Linear):
            continue
        if a is plain.head:
            assert b.weight.format == WeightFormat(torch.float32)
            continue
        count += 1
        assert b.weight.format.key == "int8"
        top = a.weight.values.abs().amax(1, keepdim=True)
        assert torch.equal(b.weight.scales, top / 127)
        error = (dequantize(b.weight, torch.float32) - a.weight.values).abs()
        assert (error <= top / 254 * 1.001).all()
        assert (b.weight.values.abs().amax(1) == 127).all()
    assert count == 4 * 3
    assert rounded.head.tied == (case != "qwen3")


PROMPTS = [[5, 17, 99, 3, 42, 7, 7, 150, 23], [11]]


def tokens_of(folders: list[Path], group: ProcessGroup) -> list[list[list[int]]]:
    models = [loaded(folder, quantization_of("int8"), group) for folder in folders]
    return [Harness(model).generate(PROMPTS, 16, chunk=5) for model in models]


def test_two_ranks_round_as_one_does(tmp_path: Path) -> None:
    """Row-parallel layers take each output's scale from all inputs, not from a rank's share."""
    folders = [tmp_path / case for case in ("qwen3-tied-bias", "gpt2")]
    for folder in folders:
        make(folder, folder.name)
        whole = loaded(folder, quantization_of("int8"))
        for rank in range(2):
            own = loaded(folder, quantization_of("int8"), Share(rank, 2))
            down, share = whole.layers[1].mlp.down.weight, own.layers[1].mlp.down.weight
            assert torch.equal(share.values, down.values.chunk(2, 1)[rank])
            assert torch.equal(share.scales, down.scales)
            q = whole.layers[1].attention.qkv.weight.rows(0, whole.layers[1].attention.qkv.sizes[0])
            own_q = own.layers[1].attention.qkv
            assert torch.equal(own_q.weight.scales[: own_q.sizes[0]], q.scales.chunk(2)[rank])
    expected = tokens_of(folders, SingleGroup())
    found = on_ranks(tokens_of, folders, tmp_path)
    assert found == [expected, expected]


def test_weights_with_nan_or_infinity_are_named(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 4] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"layers\.1\.self_attn\.k_proj\.weight has weights that are not"
    ):
        loaded(tmp_path, quantization_of("int8"))


class WithoutScales(Unquantized):
    """FP8 whose scales the checkpoint does not have."""

    def scheme_for(self, projection: str, dtype: torch.dtype) -> Scheme:
        return Scheme(FP8, PerTensor().scheme_for(projection, dtype).stored[:1])


def test_a_format_names_the_dtypes_it_is_read_from(tmp_path: Path) -> None:
    make(tmp_path, "llama-mqa-tied")
    with pytest.raises(ModelError, match="has dtype F32, expected one of: F8_E4M3"):
        loaded(tmp_path, WithoutScales())


def test_unknown_quantizations_are_refused() -> None:
    with pytest.raises(ConfigError, match="w8a8_fp8, head=fp8, head=int8, got 'int3'"):
        EngineArgs(quantization="int3")
    with pytest.raises(ConfigError, match=r"unknown quantization 'int3'; .*: float, fp8"):
        quantization_of("int3")
    assert isinstance(quantization_of(None), Unquantized)


TEXT = (
    "The river ran past the old mill, and in the evening the children came down to the water to "
    "look for stones. A quire is a gathering of pages; a book is made of many. When the rain had "
    "stopped, she opened the window, looked at the garden and thought of the letter that had not "
    "come. In the year 1844 the first message was sent by wire from one city to the next."
)


def perplexity(quantization: Quantization, ids: list[int]) -> float:
    harness = Harness(loaded(resolve_model_path(None), quantization), num_blocks=512)
    row = harness.add(ids)
    (logits,) = harness.step([(row, len(ids))])
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]))
    return float(loss.exp())


def test_int8_keeps_the_embedded_models_perplexity() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(resolve_model_path(None) / "tokenizer.json"))
    ids = tokenizer.encode(TEXT).ids
    plain = perplexity(Unquantized(), ids)
    assert abs(perplexity(quantization_of("int8"), ids) / plain - 1) < 0.005


def test_an_engine_serves_int8() -> None:
    llm = LLM(device="cpu", quantization="int8", num_kv_blocks=64, max_num_batched_tokens=64)
    (output,) = llm.generate(["The river"])
    assert output.outputs[0].text
    layers = [m for m in llm._core._executor.model.modules() if isinstance(m, Linear)]
    kinds = {layer.weight.format.key for layer in layers}
    assert "int8" in kinds
    assert all(isinstance(layer.weight, Weight) for layer in layers)
