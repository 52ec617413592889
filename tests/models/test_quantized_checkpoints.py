"""Quantized checkpoints: read exactly, sliced for ranks, or refused with the option's name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM
from quire.errors import ConfigError, ModelError
from quire.layers.linear import Linear
from quire.models import (
    Decoder,
    build_model,
    load_config,
    load_weights,
    model_quantization,
    spec_from_config,
)
from quire.ops.reference.quantized import dequantize
from quire.parallel import ProcessGroup
from tests.gloo_ranks import on_ranks
from tests.models.harness import Harness
from tests.models.quantized_checkpoints import CASES, make_quantized
from tests.models.test_parallel import Ranked

ROUNDS_INPUTS = {
    "fp8-channel-token", "fp8-static", "w8a8", "w8a8-static", "fp8-blocks", "fp8-per-tensor",
    "fp8-per-output", "fp8-per-tensor-static", "modelopt",
}  # fmt: skip
PROMPT = [5, 17, 99, 3, 42, 7, 7, 150, 23]
_NAMES = {
    "attention.qkv.q": "self_attn.q_proj",
    "attention.qkv.k": "self_attn.k_proj",
    "attention.qkv.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp.up.gate": "mlp.gate_proj",
    "mlp.up.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def loaded(folder: Path, group: ProcessGroup | None = None, **more: Any) -> Decoder:
    config = load_config(folder)
    spec = spec_from_config(config)
    quantization = model_quantization(folder, config, spec, more.pop("wanted", None))
    model = build_model(
        spec, device="cpu", dtype=torch.float32, group=group, quantization=quantization,
        expert_parallel=more.pop("expert_parallel", False),
    )  # fmt: skip
    load_weights(model, folder, **more)
    return model


def projections(model: Decoder) -> Iterator[tuple[str, Linear, Tensor]]:
    """Yields each projection's name in the checkpoint, its layer, and its weights in float64."""
    for index, block in enumerate(model.layers):
        for part, layer in block.named_modules():
            if isinstance(layer, Linear):
                whole = torch.cat([dequantize(w, torch.float64) for w in layer.weights])
                for output, own in zip(layer.outputs, whole.split(layer.sizes), strict=True):
                    name = _NAMES[f"{part}.{output.name}" if output.name else part]
                    yield f"model.layers.{index}.{name}.weight", layer, own


def logits(model: Decoder) -> Tensor:
    harness = Harness(model)
    return harness.step([(harness.add(PROMPT), len(PROMPT))])[0]


@pytest.mark.parametrize("case", CASES)
def test_weights_equal_those_of_the_original_layout(case: str, tmp_path: Path) -> None:
    exact = make_quantized(tmp_path, case)
    model = loaded(tmp_path)
    found = {name: own for name, _, own in projections(model)}
    assert found.keys() == exact.keys()
    for name, expected in exact.items():
        np.testing.assert_allclose(found[name].numpy(), expected, rtol=1e-6, atol=1e-9)
    expected, given = logits(loaded(tmp_path / "exact")), logits(model)
    error = (given - expected).norm() / expected.norm()
    assert error < (0.25 if case in ROUNDS_INPUTS else 1e-5)
    assert (error > 1e-4) == (case in ROUNDS_INPUTS)


# Newer releases of the library no longer read the order by groups.
COMPRESSED = [
    case
    for case, (settings, _) in CASES.items()
    if "config_groups" in settings and case != "w4a16-group-order"
]


@pytest.mark.parametrize("case", COMPRESSED)
def test_the_layouts_are_those_of_the_library(case: str) -> None:
    """The library, if installed, reads the same weights."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    settings, maker = CASES[case]
    rng = np.random.default_rng(0)
    tensors, expected = maker(rng, rng.normal(size=(32, 64)))
    scheme = QuantizationScheme.model_validate(settings["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(settings["format"])
    weight = compressor.decompress(tensors, scheme)["weight"]
    # The library rounds to the dtype of the scales.
    np.testing.assert_allclose(weight.double().numpy(), expected, rtol=4e-3, atol=1e-3)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world", [2])
def test_each_rank_holds_its_part_of_the_whole(case: str, world: int, tmp_path: Path) -> None:
    """Inputs are cut within groups of 32: 24 of 48, and 40 of 80."""
    exact = make_quantized(tmp_path, case)
    for rank in range(world):
        for name, layer, own in projections(loaded(tmp_path, Ranked(rank, world))):
            dim = 1 if layer.split == "inputs" else 0
            expected = np.split(exact[name], world, dim)[rank]
            np.testing.assert_allclose(own.numpy(), expected, rtol=1e-6, atol=1e-9)


def _logits_of_all(folders: list[Path], group: ProcessGroup) -> list[Any]:
    return [logits(loaded(folder, group)).tolist() for folder in folders]


def test_two_ranks_give_the_logits_of_one(tmp_path: Path) -> None:
    folders = [tmp_path / case for case in CASES]
    for folder in folders:
        make_quantized(folder, folder.name)
    found = on_ranks(_logits_of_all, folders, tmp_path)
    assert found[0] == found[1]
    for folder, given in zip(folders, found[0], strict=True):
        expected = logits(loaded(folder))
        error = (torch.tensor(given) - expected).norm() / expected.norm()
        # A rank computes per-token scales from its own part of the inputs.
        assert error < (0.25 if folder.name in ROUNDS_INPUTS else 1e-5), folder.name


def test_projections_with_orders_of_their_own_are_kept_apart(tmp_path: Path) -> None:
    make_quantized(tmp_path, "gptq-act-order")
    layer = loaded(tmp_path).layers[0]
    assert len(layer.attention.qkv.stacks) == 3
    assert len(layer.mlp.up.stacks) == 2
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.up has 2 weights instead of one"):
        _ = layer.mlp.up.weight


def test_stacked_projections_share_the_largest_scale_of_inputs(tmp_path: Path) -> None:
    make_quantized(tmp_path, "fp8-static")
    tensors = load_file(tmp_path / "model.safetensors")
    names = [f"model.layers.1.self_attn.{p}_proj.input_scale" for p in "qkv"]
    weight = loaded(tmp_path).layers[1].attention.qkv.weight
    assert weight.input_scale.tolist() == [max(float(tensors[name]) for name in names)] * 3


def configure(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def test_modules_may_have_settings_of_their_own(tmp_path: Path) -> None:
    """GPTQ's `dynamic`, compressed-tensors' targets and exceptions."""
    exact = make_quantized(tmp_path / "a", "gptq")
    eight = make_quantized(tmp_path / "b", "gptq-8")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    other = load_file(tmp_path / "b" / "model.safetensors")
    plain = load_file(tmp_path / "a" / "exact" / "model.safetensors")
    for name in list(tensors):
        if "layers.1.mlp." in name:
            tensors[name] = other[name]
        if "layers.2.self_attn.v_proj" in name:
            del tensors[name]
    v = "model.layers.2.self_attn.v_proj.weight"
    tensors[v] = plain[v]
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    rules = {"-:.*layers\\.2\\..*v_proj": {}, "+:model\\.layers\\.1\\.mlp\\.": {"bits": 8}}
    configure(tmp_path / "a", lambda own: own.update(dynamic=rules))
    model = loaded(tmp_path / "a")
    for name, _, own in projections(model):
        expected = eight[name] if "layers.1.mlp." in name else exact[name]
        np.testing.assert_allclose(own.numpy(), expected, rtol=1e-6, atol=1e-7)
    assert len(model.layers[2].attention.qkv.stacks) == 2

    exact = make_quantized(tmp_path / "c", "w4a16")
    tensors = load_file(tmp_path / "c" / "model.safetensors")
    plain = load_file(tmp_path / "c" / "exact" / "model.safetensors")
    for name in list(tensors):
        if "o_proj" in name or "layers.0.mlp.down" in name:
            del tensors[name]
            weight = f"{name.rpartition('.')[0]}.weight"
            tensors[weight] = plain[weight]
    save_file(tensors, tmp_path / "c" / "model.safetensors")
    ignore = ["lm_head", "re:.*o_proj$", "model.layers.0.mlp.down_proj"]
    configure(tmp_path / "c", lambda own: own.update(ignore=ignore))
    for name, _, own in projections(loaded(tmp_path / "c")):
        np.testing.assert_allclose(own.numpy(), exact[name], rtol=1e-6, atol=1e-7)


def test_the_second_name_of_gptq_formats(tmp_path: Path) -> None:
    """Reads `format`, which is transformers 5's name of `checkpoint_format` and changes the stored
    zeros."""
    exact = make_quantized(tmp_path, "gptq-asym-v2")
    configure(tmp_path, lambda own: own.update(format=own.pop("checkpoint_format")))
    for name, _, own in projections(loaded(tmp_path)):
        np.testing.assert_allclose(own.numpy(), exact[name], rtol=1e-6, atol=1e-7)


def _set(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda settings: settings.update({name: value})


def _weights(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda settings: settings["config_groups"]["group_0"]["weights"].update(values)


REFUSED: list[tuple[str, Callable[[dict[str, Any]], None], str]] = [
    ("gptq", _set("quant_method", "bitsandbytes"), "quantized by bitsandbytes"),
    ("gptq", _set("quant_method", "hqq"), "quantized by hqq"),
    ("gptq", _set("quant_method", ["gptq"]), r"quantized by \['gptq'\]"),
    ("gptq", _set("bits", 3), "bits 3; expected one of: 4, 8"),
    ("gptq", _set("checkpoint_format", "marlin"), "checkpoint_format 'marlin'"),
    ("gptq", _set("group_size", 20), "group_size 20"),
    ("gptq", _set("dynamic", {"+:(": {}}), r"'\+:\(' is not a regular expression"),
    (
        "gptq-asym",
        _set("meta", {"quantizer": ["gptqmodel:5.0.0"]}),
        "gptqmodel:5.0.0 may have stored the zeros",
    ),
    ("awq", _set("version", "gemv"), "version 'gemv'"),
    ("awq", lambda c: c.update(version=None, format="gemv"), "version 'gemv'"),
    ("awq", _set("zero_point", False), "awq without zero points"),
    ("fp8-blocks", _set("activation_scheme", "static"), "static activation scales"),
    ("fp8-blocks", _set("weight_block_size", [128]), "weight_block_size must be two sizes"),
    ("fp8-blocks", _set("fmt", "e5m2"), "fmt 'e5m2'"),
    ("w4a16", _set("format", "marlin-24"), "format 'marlin-24'"),
    ("w4a16", _set("sparsity_config", {"format": "sparse-bitmask"}), "sparsity_config"),
    ("w4a16", _weights(num_bits=3), "num_bits 3"),
    ("w4a16", _weights(strategy="tensor_group"), "strategy 'tensor_group'"),
    ("w8a8", _weights(type="float"), "type float in the format int-quantized"),
    ("mxfp4", _weights(num_bits=8), "num_bits 8; expected one of: 4"),
    ("mxfp4", _weights(strategy="channel"), "strategy 'channel'; expected one of: group"),
    ("mxfp4", _weights(symmetric=False), "symmetric False; expected one of: True"),
]


@pytest.mark.parametrize(("case", "change", "message"), REFUSED)
def test_unknown_quantization_settings_are_refused(
    case: str, change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    make_quantized(tmp_path, case)
    configure(tmp_path, change)
    with pytest.raises(ModelError, match=message):
        loaded(tmp_path)


Q = "model.layers.1.self_attn.q_proj"
BROKEN: list[tuple[str, str, Callable[[Tensor], object], str]] = [
    ("gptq", "qzeros", lambda t: t.fill_(0x66666666), "has zeros that are not all 7 or 8"),
    ("gptq", "qzeros", lambda t: t[0].fill_(0x78787878), "has zeros that are not all 7 or 8"),
    ("gptq", "g_idx", lambda t: t[0].fill_(1), "out of order, unlike the config"),
    ("gptq", "bias", lambda t: t[0].fill_(1), "is a bias that is not zero"),
    ("gptq-act-order", "g_idx", lambda t: t[0].fill_(2), "group indices outside 0 to 1"),
    ("gptq-act-order", "g_idx", lambda t: t.zero_(), "puts more than 32 inputs into a group"),
    ("gptq", "scales", lambda t: t[0, 3].fill_(-1), "scales that are not positive"),
    ("awq", "scales", lambda t: t[1, 3].fill_(torch.inf), "scales that are not positive"),
    ("w4a16", "weight_shape", lambda t: t[0].fill_(1), r"holds \[1, 48\], expected \[48, 48\]"),
    ("fp8-static", "input_scale", lambda t: t.fill_(0), "scales that are not positive"),
    ("fp8-blocks", "weight", lambda t: t[3, 4].fill_(torch.nan), "values that are NaN"),
    ("mxfp4", "weight_scale", lambda t: t[0, 0].fill_(255), "scales that are NaN"),
]


@pytest.mark.parametrize(("case", "tensor", "change", "message"), BROKEN)
def test_insane_stored_values_are_named(
    case: str, tensor: str, change: Callable[[Tensor], object], message: str, tmp_path: Path
) -> None:
    make_quantized(tmp_path, case)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors[f"{Q}.{tensor}"])
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{Q}\.{tensor} .*{message}"):
        loaded(tmp_path)


@pytest.mark.parametrize("case", ["gptq-act-order", "w4a16-asym", "fp8-blocks"])
def test_tensors_with_an_axis_of_one_behind_are_the_same(case: str, tmp_path: Path) -> None:
    exact = make_quantized(tmp_path, case)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {name: tensors[name].unsqueeze(-1) for name in tensors if name.startswith(Q)}
    save_file(tensors, tmp_path / "model.safetensors")
    for name, _, own in projections(loaded(tmp_path)):
        np.testing.assert_allclose(own.numpy(), exact[name], rtol=1e-6, atol=1e-7)


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    make_quantized(tmp_path, "gptq")
    with pytest.raises(ConfigError, match="quantized already, by gptq"):
        loaded(tmp_path, wanted="int8")


def test_random_weights_are_not_made_in_a_checkpoints_format(tmp_path: Path) -> None:
    make_quantized(tmp_path, "gptq")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="dummy weights cannot be stored in the checkpoint"):
        loaded(tmp_path, load_format="dummy")


@pytest.mark.parametrize(
    "case", ["fp8-blocks", "fp8-per-tensor", "fp8-static", "fp8-channel-token", "modelopt"]
)
def test_random_weights_in_8_bit_floats(case: str, tmp_path: Path) -> None:
    make_quantized(tmp_path, case)
    (tmp_path / "model.safetensors").unlink()
    model = loaded(tmp_path, load_format="dummy")
    for _, layer, values in projections(model):
        assert layer.weights[0].values.dtype == torch.float8_e4m3fn
        assert abs(values).max() <= 0.04
        assert 0.015 < values.std() < 0.025
    assert torch.isfinite(logits(model)).all()


def test_an_engine_serves_a_quantized_checkpoint(tmp_path: Path) -> None:
    make_quantized(tmp_path, "gptq-act-order")
    llm = LLM(str(tmp_path), device="cpu", skip_tokenizer_init=True, num_kv_blocks=64)
    with pytest.raises(ConfigError, match="quantized already"):
        LLM(str(tmp_path), device="cpu", skip_tokenizer_init=True, quantization="int4")
    del llm
