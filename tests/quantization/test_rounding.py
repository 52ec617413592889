"""Unquantized checkpoints rounded to few bits while they are read."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from quire.errors import ModelError
from quire.layers.linear import Linear
from quire.models import Decoder, build_model, load_config, load_weights, spec_from_config
from quire.ops import Weight
from quire.ops.reference.quantized import LARGEST, dequantize
from quire.parallel import ProcessGroup
from quire.quantization import ProjectionShare, quantization_of
from tests.models.checkpoints import make
from tests.models.harness import Harness
from tests.models.test_parallel import Ranked

KINDS = ["fp8", "int4", "int8", "w8a8", "w8a8_fp8"]


def loaded(folder: Path, kind: str | None, group: ProcessGroup | None = None) -> Decoder:
    spec = spec_from_config(load_config(folder))
    quantization = quantization_of(kind)
    model = build_model(
        spec, device="cpu", dtype=torch.float32, group=group, quantization=quantization
    )
    load_weights(model, folder)
    return model


def layers(model: Decoder) -> list[Linear]:
    return [m for m in model.layers.modules() if isinstance(m, Linear)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["qwen3", "gpt2"])
def test_each_weight_is_within_half_a_step(kind: str, case: str, tmp_path: Path) -> None:
    make(tmp_path, case)
    plain, rounded = loaded(tmp_path, None), loaded(tmp_path, kind)
    assert rounded.head.weight.format.scales is None
    for a, b in zip(layers(plain), layers(rounded), strict=True):
        exact, scales = a.weight.values, b.weight.scales
        found = dequantize(b.weight, torch.float32)
        if kind in ("fp8", "w8a8_fp8"):
            # Three bits of mantissa: half of an eighth; below the normal numbers, half of 2^-9.
            step = torch.maximum(exact.abs() / 8, scales * 2.0**-9)
            assert torch.equal(scales, exact.abs().amax(1, keepdim=True) / LARGEST[b.weight.dtype])
        elif kind == "int4":
            groups = torch.arange(exact.shape[1]) // 128
            step = scales.float()[:, groups]
        else:
            step = scales
        assert ((found - exact).abs() <= step * 0.51).all()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_stay_near(kind: str, tmp_path: Path) -> None:
    make(tmp_path, "llama")
    prompt = [5, 17, 99, 3, 42, 7, 7, 150, 23]

    def logits(model: Decoder) -> torch.Tensor:
        harness = Harness(model)
        return harness.step([(harness.add(prompt), len(prompt))])[0]

    plain, rounded = logits(loaded(tmp_path, None)), logits(loaded(tmp_path, kind))
    error = (rounded - plain).norm() / plain.norm()
    assert error < {"fp8": 0.15, "int4": 0.6, "int8": 0.05, "w8a8": 0.08, "w8a8_fp8": 0.2}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_hold_parts_of_the_same_numbers(kind: str, tmp_path: Path) -> None:
    make(tmp_path, "llama")
    whole = [dequantize(x.weight, torch.float64) for x in layers(loaded(tmp_path, kind))]
    for rank in range(2):
        for layer, expected in zip(
            layers(loaded(tmp_path, kind, Ranked(rank, 2))), whole, strict=True
        ):
            own = dequantize(layer.weight, torch.float64)
            if layer.split == "inputs":
                assert torch.equal(own, expected.chunk(2, 1)[rank])
            else:
                sizes = [output.size for output in layer.outputs]
                parts = [part.chunk(2)[rank] for part in expected.split(sizes)]
                assert torch.equal(own, torch.cat(parts))


def test_groups_of_one_number_and_of_zeros(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name][0] = 0.0
    tensors[name][1] = 0.75
    tensors[name][2] = -0.75
    save_file(tensors, tmp_path / "model.safetensors")
    for kind in KINDS:
        weight = loaded(tmp_path, kind).layers[0].mlp.down.weight
        found = dequantize(weight, torch.float32)
        assert not found[0].any()
        torch.testing.assert_close(found[1:3], tensors[name][1:3], rtol=1e-3, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_with_nan_or_infinity_are_named(kind: str, tmp_path: Path) -> None:
    make(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"][3, 4] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"1\.self_attn\.v_proj\.weight has weights that are not"):
        loaded(tmp_path, kind)


def test_no_unquantized_copy_of_the_model_is_made(tmp_path: Path) -> None:
    """After loading, only the rounded weights and the never rounded ones are in memory."""
    make(tmp_path, "llama")
    sizes = {}
    for kind in (None, *KINDS):
        model = loaded(tmp_path, kind)
        sizes[kind] = sum(parameter.nbytes for x in layers(model) for parameter in x.parameters())
        format = layers(model)[0].weight.format
        weights = [layer.weight for layer in layers(model)]
        assert sizes[kind] == sum(format.weight_bytes(w.outputs, w.inputs) for w in weights)
    assert sizes["int4"] < sizes["int8"] < sizes[None] / 3


class _LiveBytes(TorchDispatchMode):
    """Counts the current and the peak bytes of tensors created within it."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if key in self._known or not size:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)

        def freed() -> None:
            self._known.discard(key)
            self.live -= size

        weakref.finalize(storage, freed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_is_rounded_in_small_pieces(kind: str) -> None:
    """Rounding in pieces needs no more memory for larger tensors."""
    scheme = quantization_of(kind).scheme_for("layers.0.mlp.down", torch.bfloat16)
    weight = Weight.empty(scheme.format, 4096, 4096, torch.device("cpu"))
    part = torch.randn(4096, 4096).bfloat16()
    (stored,) = scheme.stored
    share = ProjectionShare((0, 4096), (0, 4096), 4096, 4096)
    # Tensors that are there already are views of known storages.
    with _LiveBytes() as mode:
        mode._known |= {
            tensor.untyped_storage().data_ptr()
            for tensor in (part, weight.values, weight.scales, weight.zeros)
            if tensor is not None
        }
        stored.write(weight, part, 0, share)
    assert 0 < mode.peak < part.nbytes
    exact = part[:64].float()
    error = (dequantize(weight.rows(0, 64), torch.float32) - exact).norm() / exact.norm()
    assert error < {"int4": 0.15, "fp8": 0.05, "w8a8_fp8": 0.05}.get(kind, 0.02)


DAMAGE: dict[str, tuple[Any, str]] = {
    "zero": (lambda w: torch.zeros_like(w), "zero throughout"),
    "huge": (lambda w: w * 1e6, "as large as"),
    "off centre": (lambda w: w + w.std(), "mean is"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_insane_weights_are_not_served(kind: str, tmp_path: Path) -> None:
    make(tmp_path, "llama")
    damage, message = DAMAGE[kind]
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = damage(tensors[name]).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    loaded(tmp_path, None)
    with pytest.raises(ModelError, match=rf"model\.layers\.1\.mlp\.down_proj .*{message}"):
        loaded(tmp_path, "int8")
