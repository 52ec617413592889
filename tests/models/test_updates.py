"""Weights that are updated in place equal those of a model that loads them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.errors import ModelError
from quire.layers.linear import Linear
from quire.models import (
    build_model,
    load_config,
    load_weights,
    model_quantization,
    prepack,
    spec_from_config,
)
from quire.models.decoder import Decoder
from quire.models.prepack import prepack_weights
from quire.models.tensor_file import TensorFile
from quire.models.updates import WeightUpdate
from quire.parallel import ProcessGroup, SingleGroup
from tests.gloo_ranks import on_ranks
from tests.models import checkpoints
from tests.models.checkpoints import make
from tests.models.quantized_checkpoints import CASES as QUANTIZED
from tests.models.quantized_checkpoints import make_quantized
from tests.slow import some

FIRST = {family: case for case, (family, _) in reversed(checkpoints.CASES.items())}
FAMILIES = sorted({*FIRST.values(), "llama-mqa-tied", "gemma4-moe", "gpt-oss", "deepseek-v3"})
FAMILIES = [case for case in FAMILIES if case in checkpoints.CASES]
FORMATS = ["int8", "fp8", "w8a8", "w8a8_fp8", "int4"]


def load(folder: Path, wanted: str | None = None, group: ProcessGroup | None = None) -> Decoder:
    config = load_config(folder)
    spec = spec_from_config(config)
    quantization = model_quantization(folder, config, spec, wanted)
    model = build_model(
        spec, device="cpu", dtype=torch.float32, group=group or SingleGroup(),
        quantization=quantization,
    )  # fmt: skip
    load_weights(model, folder)
    return model


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {
        k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()
    }


def changed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns other weights of the same shapes. Tied tensors stay equal."""
    return {name: tensor.flip(0).contiguous() for name, tensor in tensors.items()}


def changed_copy(folder: Path) -> Path:
    """Returns a folder with the same model and other weights."""
    copy = folder.with_name(f"{folder.name}-changed")
    shutil.copytree(folder, copy)
    for file in copy.glob("*.safetensors"):
        save_file(changed(load_file(file)), file)
    return copy


def state(model: Decoder) -> dict[str, Tensor]:
    return {name: parameter.clone() for name, parameter in model.named_parameters()}


def assert_equal(model: Decoder, other: Decoder) -> None:
    own, others = state(model), state(other)
    assert own.keys() == others.keys()
    for name, tensor in own.items():
        raw, expected = (each.contiguous().view(torch.uint8) for each in (tensor, others[name]))
        assert torch.equal(raw, expected), name


def update(model: Decoder, tensors: dict[str, Tensor], **options: Any) -> WeightUpdate:
    found = WeightUpdate(model, [TensorFile(tensors)], **options)
    found.write()
    return found


@pytest.mark.parametrize("case", some(FAMILIES))
def test_families(tmp_path: Path, case: str) -> None:
    make(tmp_path / "model", case)
    other = changed_copy(tmp_path / "model")
    model, addresses = load(tmp_path / "model"), {}
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    found = update(model, tensors_of(other), whole=True)
    assert found.nbytes > 0
    assert_equal(model, load(other))
    assert addresses == {name: p.data_ptr() for name, p in model.named_parameters()}


@pytest.mark.parametrize("wanted", FORMATS)
def test_rounding(tmp_path: Path, wanted: str) -> None:
    make(tmp_path / "model", "llama")
    other = changed_copy(tmp_path / "model")
    model = load(tmp_path / "model", wanted)
    update(model, tensors_of(other))
    assert_equal(model, load(other, wanted))


@pytest.mark.parametrize("case", some(sorted(QUANTIZED)))
def test_quantized_checkpoints(tmp_path: Path, case: str) -> None:
    for seed, name in enumerate(("one", "other")):
        torch.manual_seed(seed)
        make_quantized(tmp_path / name, case)
    model = load(tmp_path / "other")
    update(model, tensors_of(tmp_path / "one"))
    assert_equal(model, load(tmp_path / "one"))


def test_latent_projection_of_a_quantized_checkpoint(tmp_path: Path) -> None:
    make_quantized(tmp_path / "model", "fp8-blocks", "deepseek-v3")
    other = changed_copy(tmp_path / "model")
    model = load(tmp_path / "model")
    update(model, tensors_of(other))
    assert_equal(model, load(other))
    names = [name for name in tensors_of(other) if "kv_b_proj" in name]
    with pytest.raises(ModelError, match="an update must bring all projections"):
        update(model, {names[0]: tensors_of(other)[names[0]]})


def _updated_on_rank(what: tuple[list[Path], str | None], group: ProcessGroup) -> list[bool]:
    folders, wanted = what
    found = []
    for folder, other in zip(folders[::2], folders[1::2], strict=True):
        model = load(folder, wanted, group)
        update(model, tensors_of(other))
        assert_equal(model, load(other, wanted, group))
        found.append(True)
    return found


@pytest.mark.parametrize("wanted", [None, "int8"])
def test_ranks(tmp_path: Path, wanted: str | None) -> None:
    folders = []
    for case in ("qwen3-tied-bias", "qwen3-moe" if "qwen3-moe" in checkpoints.CASES else "llama"):
        make(tmp_path / case, case)
        folders += [tmp_path / case, changed_copy(tmp_path / case)]
    assert on_ranks(_updated_on_rank, (folders, wanted), tmp_path) == [[True, True]] * 2


def test_some_tensors(tmp_path: Path) -> None:
    make(tmp_path / "model", "llama")
    model, new = load(tmp_path / "model"), changed(tensors_of(tmp_path / "model"))
    before = state(model)
    update(model, {n: t for n, t in new.items() if n.endswith(("q_proj.weight", "norm.weight"))})
    for name, tensor in state(model).items():
        touched = "qkv" in name or "norm" in name
        assert torch.equal(tensor, before[name]) is not touched, name


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model.layers.0.mlp.gate.weight": torch.zeros(1)}, "unexpected tensor"),
        ({"model.norm.weight": torch.zeros(5)}, r"shape \(5,\), expected \(48,\)"),
        ({"model.norm.weight": torch.zeros(48, dtype=torch.int32)}, "dtype I32, expected one of"),
        ({}, "at least one tensor"),
    ],
)
def test_refusals(tmp_path: Path, tensors: dict[str, Tensor], message: str) -> None:
    make(tmp_path / "model", "llama")
    model, good = load(tmp_path / "model"), {}
    before = state(model)
    if tensors:
        good = {"lm_head.weight": changed(tensors_of(tmp_path / "model"))["lm_head.weight"]}
    with pytest.raises(ModelError, match=message):
        WeightUpdate(model, [TensorFile({**good, **tensors})])
    for name, tensor in state(model).items():
        assert torch.equal(tensor, before[name])


def test_heads_that_are_not_tied(tmp_path: Path) -> None:
    make(tmp_path / "model", "llama-mqa-tied")
    model, new = load(tmp_path / "model"), changed(tensors_of(tmp_path / "model"))
    embedding = new["model.embed_tokens.weight"]
    update(model, {**new, "lm_head.weight": embedding.clone()})
    with pytest.raises(ModelError, match="tied to the embeddings"):
        WeightUpdate(model, [TensorFile({**new, "lm_head.weight": embedding + 1})])


@pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="PyTorch without FBGEMM"
)
@pytest.mark.parametrize("wanted", [None, "int8"])
def test_weights_in_a_cpu_order(
    tmp_path: Path, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepack, "_FEWEST", 1)
    make(tmp_path / "model", "llama")
    for file in (tmp_path / "model").glob("*.safetensors"):
        save_file({k: v.bfloat16() for k, v in load_file(file).items()}, file)
    other = changed_copy(tmp_path / "model")
    model, fresh = load(tmp_path / "model", wanted), load(other, wanted)
    for each in (model, fresh):
        prepack_weights(each)
    new = tensors_of(other)
    update(model, new)
    x = torch.randn(1, 48)
    for own, expected in zip(model.modules(), fresh.modules(), strict=True):
        if isinstance(own, Linear) and own.inputs == 48:
            assert any(weight.prepacked is not None for weight in own.weights)
            assert torch.equal(own(x), expected(x))
    name = next(name for name in new if name.endswith("q_proj.weight"))
    with pytest.raises(ModelError, match=r"it lacks model\.layers\.0\.self_attn\.k_proj"):
        WeightUpdate(model, [TensorFile({name: new[name]})])
