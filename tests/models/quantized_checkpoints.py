"""Tiny quantized checkpoints and their weights in float64: each published layout, written and read
with numpy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.checkpoints import make

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Made = tuple[dict[str, Tensor], Floats]
"""A module's tensors by their names behind the module's, and the weights that they stand for."""
Maker = Callable[[np.random.Generator, Floats], Made]

_PROJECTION = re.compile(
    r"^model\.layers\.\d+\.(self_attn|mlp(\.experts\.\d+|\.shared_experts)?)"
    r"\.\w+_proj(_with_mqa)?\.weight$"
)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output that each 4 bits of an int32 hold, from the lowest."""


def e4m3(codes: NDArray[np.uint8]) -> Floats:
    """Returns the numbers of 8-bit floats with 4 bits of exponent and 3 of mantissa."""
    bits = codes.astype(np.int64)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    small = mantissa * 2.0**-9
    large = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return np.where(bits >> 7, -1.0, 1.0) * np.where(exponent == 0, small, large)


def packed(integers: Integers, bits: int, axis: int) -> Tensor:
    """Returns unsigned integers packed along an axis, the first in the lowest bits of an int32."""
    each = 32 // bits
    moved = np.moveaxis(integers, axis, -1)
    behind = -moved.shape[-1] % each
    padded = np.pad(moved, ((0, 0), (0, behind))).reshape(len(moved), -1, each)
    words = np.zeros(padded.shape[:2], np.uint32)
    for place in range(each):
        words |= padded[..., place].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(np.moveaxis(words, -1, axis).copy().view(np.int32))


def _half(x: Floats) -> tuple[Tensor, Floats]:
    half = torch.from_numpy(np.ascontiguousarray(x)).half()
    return half, half.double().numpy()


def _drawn(
    rng: np.random.Generator, weight: Floats, bits: int, group: int, symmetric: bool,
    order: Integers | None = None,
) -> tuple[Integers, Tensor, Integers, Floats]:  # fmt: skip
    """Returns integers [N, K], scales [N, G] in fp16, zeros [N, G], and the weights they
    represent."""
    outputs, inputs = weight.shape
    group = inputs if group == -1 else group
    index = np.arange(inputs) // group if order is None else order
    count = -(-inputs // group)
    top = 2**bits - 1
    if symmetric:
        zeros = np.full((outputs, count), 2 ** (bits - 1))
    else:
        zeros = rng.integers(0, top + 1, (outputs, count))
        zeros[0, 0], zeros[-1, -1] = 0, top
    half, scales = _half(np.abs(weight).max() / top * rng.uniform(1, 3, (outputs, count)))
    values = np.round(weight / scales[:, index]).astype(np.int64) + zeros[:, index]
    values = values.clip(0, top)
    return values, half, zeros, (values - zeros[:, index]) * scales[:, index]


def gptq(
    bits: int = 4, group: int = 32, *, sym: bool = True, added: int = 1, desc_act: bool = False,
    g_idx: bool = True,
) -> Maker:  # fmt: skip
    def made(rng: np.random.Generator, weight: Floats) -> Made:
        inputs = weight.shape[1]
        each = inputs if group == -1 else group
        order = np.arange(inputs) // each
        if desc_act:
            order = rng.permutation(order)
        values, scales, zeros, exact = _drawn(rng, weight, bits, group, sym, order)
        stored = (zeros - added) & (2**bits - 1)
        tensors = {
            "qweight": packed(values.T, bits, 0),
            "scales": scales.t().contiguous(),
            "qzeros": packed(stored.T, bits, 1),
        }
        if g_idx:
            tensors["g_idx"] = torch.from_numpy(order.astype(np.int32))
            tensors["bias"] = torch.zeros(len(weight), dtype=torch.float16)
        return tensors, exact

    return made


def awq(group: int = 32) -> Maker:
    def reordered(x: Integers) -> Integers:
        return x.reshape(len(x), -1, 8)[:, :, _AWQ_ORDER].reshape(len(x), -1)

    def made(rng: np.random.Generator, weight: Floats) -> Made:
        values, scales, zeros, exact = _drawn(rng, weight, 4, group, False)
        tensors = {
            "qweight": packed(reordered(values.T), 4, 1),
            "scales": scales.t().contiguous(),
            "qzeros": packed(reordered(zeros.T), 4, 1),
        }
        return tensors, exact

    return made


def pack_quantized(
    bits: int = 4, group: int = 32, *, sym: bool = True, order: bool = False
) -> Maker:
    """Offset binary: unsigned integers with zero in the middle."""

    def made(rng: np.random.Generator, weight: Floats) -> Made:
        each = weight.shape[1] if group == -1 else group
        index = np.arange(weight.shape[1]) // each
        if order:
            index = rng.permutation(index)
        values, scales, zeros, exact = _drawn(rng, weight, bits, group, sym, index)
        tensors = {
            "weight_packed": packed(values, bits, 1),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not sym:
            tensors["weight_zero_point"] = packed(zeros, bits, 0)
        if order:
            tensors["weight_g_idx"] = torch.from_numpy(index.astype(np.int32))
        return tensors, exact

    return made


def float8(
    block: tuple[int | None, int | None], scale: str = "weight_scale", *,
    shape: tuple[int, ...] | None = None, inputs: str | None = None,
) -> Maker:  # fmt: skip
    """Returns a maker of 8-bit float weights.

    Args:
        block: numbers of outputs and inputs with one scale; None: all.
        scale: name of the scales.
        shape: shape of the stored scales, -1 for the outputs; None: one per block.
        inputs: name of a fixed scale of the inputs, or None.
    """

    def made(rng: np.random.Generator, weight: Floats) -> Made:
        a, b = (size or whole for size, whole in zip(block, weight.shape, strict=True))
        counts = -(-weight.shape[0] // a), -(-weight.shape[1] // b)
        scales = rng.uniform(0.5, 2.0, counts).astype(np.float32) * np.abs(weight).max() / 400
        scales = scales.astype(np.float32)
        wide = scales.astype(np.float64).repeat(a, 0).repeat(b, 1)
        wide = wide[: weight.shape[0], : weight.shape[1]]
        codes = torch.from_numpy(weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        exact = e4m3(codes.view(torch.uint8).numpy()) * wide
        stored = torch.from_numpy(scales)
        tensors = {"weight": codes, scale: stored if shape is None else stored.reshape(shape)}
        if inputs is not None:
            tensors[inputs] = torch.tensor([0.05 * rng.uniform(1, 2)], dtype=torch.float32)
        return tensors, exact

    return made


def int8(*, inputs: bool = False, sym: bool = True) -> Maker:
    def made(rng: np.random.Generator, weight: Floats) -> Made:
        scales = torch.from_numpy(np.abs(weight).max(1, keepdims=True) / 120).bfloat16()
        wide = scales.double().numpy()
        zeros = np.zeros_like(wide) if sym else rng.integers(-128, 128, wide.shape)
        values = (np.round(weight / wide) + zeros).clip(-128, 127)
        tensors = {"weight": torch.from_numpy(values.astype(np.int8)), "weight_scale": scales}
        if not sym:
            tensors["weight_zero_point"] = torch.from_numpy(zeros.astype(np.int8))
        if inputs:
            tensors["input_scale"] = torch.tensor([0.05 * rng.uniform(1, 2)], dtype=torch.float32)
        return tensors, (values - zeros) * wide

    return made


def mxfp4(rng: np.random.Generator, weight: Floats) -> Made:
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    outputs, inputs = weight.shape
    codes = rng.integers(0, 16, (outputs, inputs))
    count = -(-inputs // 32)
    exponents = rng.integers(127 - 7, 127 - 3, (outputs, count))
    signs = np.where(codes >> 3, -1.0, 1.0)
    wide = 2.0 ** (exponents.repeat(32, 1)[:, :inputs] - 127.0)
    nibbles = codes[:, 0::2] | codes[:, 1::2] << 4
    tensors = {
        "weight_packed": torch.from_numpy(nibbles.astype(np.uint8)),
        "weight_scale": torch.from_numpy(exponents.astype(np.uint8)),
    }
    return tensors, signs * numbers[codes & 7] * wide


def _compressed(layout: str, weights: dict[str, Any], inputs: Any = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _int(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": True, **more}


def _float(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **more}


def _gptq(**more: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True,
        "checkpoint_format": "gptq", **more,
    }  # fmt: skip


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
_TOKEN = {"dynamic": True, "symmetric": True, "strategy": "token"}
_TOKENS8 = {**_TOKEN, "num_bits": 8}

CASES: dict[str, tuple[dict[str, Any], Maker]] = {
    "gptq": (_gptq(), gptq()),
    "gptq-old": (_gptq(), gptq(g_idx=False)),
    "gptq-written-as-v2": (_gptq(), gptq(added=0)),
    "gptq-v2": (_gptq(checkpoint_format="gptq_v2"), gptq(added=0)),
    "gptq-asym": (_gptq(sym=False), gptq(sym=False)),
    "gptq-asym-v2": (_gptq(sym=False, checkpoint_format="gptq_v2"), gptq(sym=False, added=0)),
    "gptq-act-order": (_gptq(desc_act=True, sym=False), gptq(sym=False, desc_act=True)),
    "gptq-columns": (_gptq(group_size=-1, desc_act=True), gptq(group=-1)),
    "gptq-8": (_gptq(bits=8), gptq(8)),
    "gptq-8-asym": (_gptq(bits=8, sym=False), gptq(8, sym=False)),
    "awq": (_AWQ, awq()),
    "awq-columns": ({**_AWQ, "group_size": -1}, awq(-1)),
    "w4a16": (_compressed("pack-quantized", _int(4, "group", group_size=32)), pack_quantized()),
    "w4a16-asym": (
        _compressed("pack-quantized", _int(4, "group", group_size=32) | {"symmetric": False}),
        pack_quantized(sym=False),
    ),
    "w4a16-weight-order": (
        _compressed("pack-quantized", _int(4, "group", group_size=32, actorder="weight")),
        pack_quantized(),
    ),
    "w4a16-group-order": (
        _compressed("pack-quantized", _int(4, "group", group_size=32, actorder="group")),
        pack_quantized(order=True),
    ),
    "w8a16": (_compressed("pack-quantized", _int(8, "channel")), pack_quantized(8, -1)),
    "w8a16-groups": (
        _compressed("pack-quantized", _int(8, "group", group_size=16)), pack_quantized(8, 16)
    ),
    "fp8-tensor": (
        _compressed("float-quantized", _float("tensor")), float8((None, None), shape=(1,))
    ),
    "fp8-channel-token": (
        _compressed("float-quantized", _float("channel"), _TOKENS8 | {"type": "float"}),
        float8((1, None)),
    ),
    "fp8-static": (
        _compressed(
            "float-quantized", _float("tensor"),
            {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
        ),
        float8((None, None), shape=(1,), inputs="input_scale"),
    ),
    "fp8-compressed-blocks": (
        _compressed("float-quantized", _float("block", block_structure=[32, 32])), float8((32, 32))
    ),
    "w8a8": (_compressed("int-quantized", _int(8, "channel"), _TOKENS8 | {"type": "int"}), int8()),
    "w8a8-asym": (
        _compressed("int-quantized", _int(8, "channel") | {"symmetric": False}), int8(sym=False)
    ),
    "w8a8-static": (
        _compressed(
            "int-quantized", _int(8, "channel"),
            {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False},
        ),
        int8(inputs=True),
    ),
    "mxfp4": (
        _compressed("mxfp4-pack-quantized", _float("group", group_size=32) | {"num_bits": 4}), mxfp4
    ),
    "fp8-blocks": (
        {"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [32, 32]},
        float8((32, 32), "weight_scale_inv"),
    ),
    "fp8-per-tensor": ({"quant_method": "fp8"}, float8((None, None), shape=())),
    "fp8-per-output": ({"quant_method": "fp8"}, float8((1, None), shape=(-1,))),
    "fp8-per-tensor-static": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        float8((None, None), shape=(), inputs="input_scale"),
    ),
    "modelopt": (
        {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
        float8((None, None), shape=(), inputs="input_scale"),
    ),
}  # fmt: skip

_FILES = {"modelopt": "hf_quant_config.json", "gptq-old": "quantize_config.json"}
"""Settings that lie outside of config.json."""


def make_quantized(folder: Path, case: str, base: str = "llama") -> dict[str, Floats]:
    """Saves the checkpoint of a case, and an unquantized one with the same weights in `folder /
    "exact"`. Returns the weights by name."""
    settings, maker = CASES[case]
    make(folder, base)
    make(folder / "exact", base)
    file = folder / "model.safetensors"
    plain, tensors = load_file(file), {}
    exact: dict[str, Floats] = {}
    rng = np.random.default_rng(sum(case.encode()))
    for name, tensor in plain.items():
        if not _PROJECTION.match(name):
            tensors[name] = tensor
            continue
        made, exact[name] = maker(rng, tensor.double().numpy())
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{key}": value.contiguous() for key, value in made.items()}
        plain[name] = torch.from_numpy(exact[name]).float()
    save_file(tensors, file)
    save_file(plain, folder / "exact" / "model.safetensors")
    if case in _FILES:
        (folder / _FILES[case]).write_text(json.dumps(settings))
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return exact
