"""Weights in the order in which a CPU multiplies them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire import LLM, SamplingParams
from quire.layers.build import Build
from quire.layers.linear import Linear
from quire.models import prepack
from quire.ops.reference import prepacked
from quire.ops.reference.dense import linear
from quire.ops.reference.quantized import dequantize, round_inputs
from quire.ops.weight import Weight, WeightFormat
from quire.parallel import SingleGroup
from quire.quantization import ProjectionShare, Unquantized
from quire.quantization.rounding import FORMATS, Rounding
from quire.runner import loaded_model

pytestmark = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="PyTorch without FBGEMM"
)


def _weight(format: WeightFormat, outputs: int, inputs: int) -> Weight:
    """Returns random weights of a format in few bits."""
    draw = torch.Generator().manual_seed(1)
    weight = Weight.empty(format, outputs, inputs, torch.device("cpu"))
    low, high = (0, 256) if format.values is torch.uint8 else (-127, 128)
    weight.values.copy_(torch.randint(low, high, weight.values.shape, generator=draw))
    assert weight.scales is not None
    weight.scales.copy_(torch.rand(weight.scales.shape, generator=draw) * 0.01 + 0.005)
    if weight.zeros is not None:
        weight.zeros.copy_(torch.randint(0, 16, weight.zeros.shape, generator=draw))
    return weight


def _plain(outputs: int, inputs: int, dtype: torch.dtype) -> Weight:
    draw = torch.Generator().manual_seed(2)
    values = torch.randn(outputs, inputs, generator=draw) * 0.02
    return Weight.plain(values.to(dtype).float())


def _error(weight: Weight, packed: Weight, rows: int) -> float:
    """Returns the largest error of a product, relative to the largest product."""
    x = torch.randn(rows, weight.inputs, generator=torch.Generator().manual_seed(rows))
    expected = x.double() @ dequantize(weight, torch.float64).t()
    return ((linear(x, packed) - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_values_are_exact(dtype: torch.dtype, rows: int) -> None:
    weight = _plain(96, 80, dtype)
    before = weight.values.clone()
    found = prepacked.prepack(weight)
    assert found is not None
    assert _error(weight, replace(weight, prepacked=found), rows) < 2e-6
    assert torch.equal(weight.values, before)


def test_values_of_every_size() -> None:
    weight = Weight.plain(torch.tensor([[3e4, 1.0], [2.0**-20, 0.0]]))
    found = prepacked.prepack(weight)
    assert found is not None
    product = found.product(torch.eye(2))
    assert torch.equal(product.t(), weight.values)


@pytest.mark.parametrize(
    "values",
    [torch.full((4, 4), 1 / 3), torch.zeros(4, 4), torch.full((4, 4), torch.inf)],
    ids=["fp32", "zero", "infinite"],
)
def test_values_that_fp16_cannot_hold_are_not_prepacked(values: torch.Tensor) -> None:
    assert prepacked.prepack(Weight.plain(values)) is None


@pytest.mark.parametrize(
    ("kind", "bound"),
    [
        (WeightFormat(torch.int8, scales=torch.float32), 5e-4),
        (WeightFormat(torch.int8, scales=torch.float32, group=32), 5e-4),
        (WeightFormat(torch.float8_e4m3fn, scales=torch.float32), 2e-6),
        (WeightFormat(torch.uint8, 4, torch.bfloat16, 16), 2e-6),
        (WeightFormat(torch.uint8, 4, torch.bfloat16, 32), 1e-2),
        (WeightFormat(torch.uint8, 4, torch.float16, 32, zeros=True), 1e-2),
    ],
    ids=lambda value: value.key if isinstance(value, WeightFormat) else "",
)
def test_few_bits(kind: WeightFormat, bound: float) -> None:
    weight = _weight(kind, 64, 64)
    found = prepacked.prepack(weight)
    assert found is not None
    for rows in (1, 5):
        assert _error(weight, replace(weight, prepacked=found), rows) < bound


@pytest.mark.parametrize("name", ["int8", "w8a8", "int4"])
@pytest.mark.parametrize("rows", [1, 2, 3, 300])
def test_errors_stay_far_below_the_formats_own(name: str, rows: int) -> None:
    draw = torch.Generator().manual_seed(4)
    original = torch.randn(48, 256, generator=draw) * 0.02
    weight = Weight.empty(FORMATS[name], 48, 256, torch.device("cpu"))
    for stored in Rounding(FORMATS[name]).scheme_for("layers.0.mlp.down", torch.float32).stored:
        stored.write(weight, original, 0, ProjectionShare((0, 48), (0, 256), 48, 256))
    x = torch.randn(rows, 256, generator=draw)
    x[:, 7] *= 30  # an input that is far larger than the others
    exact = round_inputs(x, weight).double() @ dequantize(weight, torch.float64).t()
    given = linear(x, replace(weight, prepacked=prepacked.prepack(weight)))
    own = (exact - x.double() @ original.double().t()).norm()
    bound = {"int8": 0.15, "w8a8": 1e-5, "int4": 0.15}[name]
    assert (given - exact).norm() < bound * own


@pytest.mark.parametrize("rows", [1, 3])
def test_inputs_of_eight_bits_are_exact(rows: int) -> None:
    weight = _weight(WeightFormat(torch.int8, scales=torch.float32, inputs="token"), 64, 96)
    weight.values[:, ::2], weight.values[:, 1::2] = 127, -128
    found = prepacked.prepack(weight)
    assert isinstance(found, prepacked.Integers)
    x = torch.full((rows, 96), 127.0)
    x[:, 1::2] = torch.tensor([-127.0, 126.0, -1.0])[:rows].unsqueeze(1)
    expected = x.double() @ dequantize(weight, torch.float64).t()
    torch.testing.assert_close(found.product(x * 0.37).double(), expected * 0.37, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_rows_of_zeros_and_of_no_numbers(rows: int) -> None:
    for kind in ("int8", "int4"):
        found = prepacked.prepack(_weight(FORMATS[kind], 32, 128))
        assert found is not None
        assert not found.product(torch.zeros(rows, 128)).any()
        for value in (torch.nan, torch.inf):
            x = torch.ones(rows, 128)
            x[0, 3] = value
            given = found.product(x)
            assert not given[0].isfinite().any()
            assert given[1:].isfinite().all()


def test_outputs_that_eight_bits_would_coarsen_are_widened_to_sixteen() -> None:
    weight = _weight(WeightFormat(torch.uint8, 4, torch.float16, 32, zeros=True), 32, 128)
    assert weight.scales is not None
    found = prepacked.prepack(weight)
    assert isinstance(found, prepacked.FourBits)
    assert isinstance(found.wider, prepacked.Integers)
    weight.scales[:, 0] *= 40
    found = prepacked.prepack(weight)
    assert isinstance(found, prepacked.FourBits)
    assert isinstance(found.wider, prepacked.Halves)
    for rows, most in ((1, 0.01), (40, 0.001)):
        assert _error(weight, replace(weight, prepacked=found), rows) < most


@pytest.mark.parametrize("zeros", [False, True])
def test_groups_that_do_not_divide_the_inputs_are_split(zeros: bool) -> None:
    weight = _weight(WeightFormat(torch.uint8, 4, torch.float16, 128, zeros=zeros), 32, 192)
    found = prepacked.prepack(weight)
    assert isinstance(found, prepacked.FourBits)
    assert found.group == 64
    assert _error(weight, replace(weight, prepacked=found), 1) < 0.01


def _layer(outputs: int, inputs: int, values: torch.Tensor) -> Linear:
    build = Build(SingleGroup(), Unquantized(), torch.device("cpu"), torch.float32)
    layer = Linear(inputs, outputs, build, bias=True, split="outputs")
    layer.weight.values.copy_(values)
    assert layer.bias is not None
    layer.bias.data.normal_()
    return layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(640, 320), (320, 640)])
def test_layers_give_the_same(shape: tuple[int, int], dtype: torch.dtype) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype).float()
    torch.manual_seed(0)
    layer = _layer(*shape, values)
    for rows in (1, 3, 40):
        x, residual = torch.randn(rows, shape[1]), torch.randn(rows, shape[0])
        expected = layer(x, residual=residual.clone())
        other = _layer(*shape, values)
        other.bias.data.copy_(layer.bias)  # type: ignore[union-attr,arg-type]
        prepack.prepack_layer(other)
        given = other(x, residual=residual.clone())
        torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-4)
    exact = dtype is torch.bfloat16
    assert other.weight.values.is_meta == exact
    assert other.weight.outputs == shape[0]
    stored = sum(parameter.numel() for name, parameter in other.named_parameters())
    assert stored == shape[0] * (1 if exact else 1 + shape[1])
    if not exact:
        assert torch.equal(other.weight.values, values)
        assert other.weight.values.is_contiguous() == (shape[0] <= shape[1])


def test_a_model_answers_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = ["Once upon a time", "The little dog saw"]

    def answers() -> tuple[list[list[int]], int]:
        llm = LLM(device="cpu", kv_cache_gb=0.01, max_model_len=64, max_num_seqs=2)
        try:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [list(each.outputs[0].token_ids) for each in outputs], len(packed)
        finally:
            llm.shutdown()

    packed: list[Linear] = []
    pack = prepack.prepack_layer
    monkeypatch.setattr(
        prepack, "prepack_layer", lambda layer: (packed.append(layer), pack(layer))[1]
    )
    expected, few = answers()
    monkeypatch.setattr(loaded_model, "_CACHED_WEIGHTS", 0)
    given, many = answers()
    assert given == expected
    assert few == 0 < many
    assert any(each.weight.prepacked is not None for each in packed)
