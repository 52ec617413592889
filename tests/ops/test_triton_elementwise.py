"""Norms, activations, embedding and the RoPE + store kernel against float64 twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.ops import KVLayer, reference
from quire.ops.triton import activation, norm
from quire.ops.triton.attention.rope_store import qk_norm_rope_store
from quire.ops.triton.step.embedding import embedding

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_close(got: Tensor, want: Tensor) -> None:
    """Within two roundings of the result's type."""
    epsilon = 2 * torch.finfo(got.dtype).eps if got.dtype != torch.float32 else 1e-5
    torch.testing.assert_close(got.double(), want, atol=epsilon, rtol=epsilon)


def draw(*shape: int, dtype: torch.dtype = torch.float32, device: str, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x = x.double()
    out = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return out if weight is None else out * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 100, 1536])
def test_rms_norm(kernel_device: str, dtype: torch.dtype, width: int) -> None:
    x = draw(5, width + 4, dtype=dtype, device=kernel_device)[:, :width]
    weight = draw(width, dtype=dtype, device=kernel_device, seed=1)
    assert_close(norm.rms_norm(x, weight, 1e-6), rms(x, weight, 1e-6))
    assert_close(norm.rms_norm(x, None, 1e-6), rms(x, None, 1e-6))
    residual = draw(5, 2 * width, dtype=dtype, device=kernel_device, seed=2)[:, :width]
    want = norm.rms_norm(x, weight, 1e-6).double() + residual.double()
    assert_close(norm.rms_norm(x, weight, 1e-6, residual), want)


def test_wide_weights_are_applied_before_rounding(kernel_device: str) -> None:
    """With fp32 weights, 16-bit states are rounded only once."""
    x = draw(5, 96, dtype=torch.float16, device=kernel_device)
    weight = 1 + 0.01 * draw(96, device=kernel_device, seed=1)
    want = rms(x, weight, 1e-6).half()
    assert torch.equal(norm.rms_norm(x, weight, 1e-6), want)
    assert torch.equal(reference.rms_norm(x, weight, 1e-6), want)
    assert not torch.equal(norm.rms_norm(x, weight.half(), 1e-6), want)
    case = Rope(kernel_device, torch.float16, 64, 64)
    weights = {name: 1 + 0.01 * value.float() for name, value in case.weights.items()}
    case.check(None, weights)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm(kernel_device: str, dtype: torch.dtype) -> None:
    x = draw(3, 100, dtype=dtype, device=kernel_device) + 3
    weight, bias = (draw(100, dtype=dtype, device=kernel_device, seed=seed) for seed in (1, 2))

    def twin(x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(
            x.double(), (100,), weight.double(), bias.double(), 1e-5
        )

    assert_close(norm.layer_norm(x, weight, bias, 1e-5), twin(x))


def test_norm_of_no_rows(kernel_device: str) -> None:
    empty = draw(0, 64, device=kernel_device)
    assert norm.rms_norm(empty, None, 1e-6).shape == (0, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 300, 1100])
def test_activations(kernel_device: str, dtype: torch.dtype, width: int) -> None:
    x = 3 * draw(4, 2 * width, dtype=dtype, device=kernel_device)
    gate, up = x.double().chunk(2, -1)
    functional = torch.nn.functional
    assert_close(activation.run(x, "silu_and_mul"), functional.silu(gate) * up)
    tanh = functional.gelu(gate, approximate="tanh") * up
    assert_close(activation.run(x, "gelu_tanh_and_mul"), tanh)
    assert_close(activation.run(x, "gelu"), functional.gelu(x.double()))
    assert_close(activation.run(x, "gelu_tanh"), functional.gelu(x.double(), approximate="tanh"))


def test_embedding_skips_padding_and_other_shards(kernel_device: str) -> None:
    weight = draw(20, 72, device=kernel_device)
    ids = torch.tensor([30, -1, 49, 50, 29, 2**30], dtype=torch.int32, device=kernel_device)
    out = embedding(ids, weight, start=30)
    want = torch.zeros(6, 72, device=kernel_device)
    want[0], want[2] = weight[0], weight[19]
    assert torch.equal(out, want)


class Rope:
    """Five tokens of a projection's output, one of them padding, and a cache with another
    layout."""

    def __init__(self, device: str, dtype: torch.dtype, dim: int, rotary: int) -> None:
        self.qkv = draw(5, 12, dim, dtype=dtype, device=device)[:, 1:11]
        self.positions = torch.tensor([7, 8, 0, 3, -1], dtype=torch.int32, device=device)
        self.slots = torch.tensor([9, 10, 4, 23, -1], dtype=torch.int64, device=device)
        angles = torch.outer(torch.arange(16.0), 0.5 ** torch.arange(rotary // 2))
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], -1).to(device)
        self.cache = torch.full((6, 3, 2, 2, 4, dim), -7.0, dtype=dtype, device=device)
        self.weights = {
            "q_weight": draw(dim, dtype=dtype, device=device, seed=3),
            "k_weight": draw(dim, dtype=dtype, device=device, seed=4),
        }

    def check(
        self,
        cos_sin: Tensor | None,
        weights: dict[str, Tensor],
        interleaved: bool = False,
        **tuning: int,
    ) -> None:
        """Makes the same call of the kernel and of the reference in float64."""
        same = {
            "positions": self.positions,
            "slots": self.slots,
            "eps": 1e-6,
            "interleaved": interleaved,
        }
        wide = self.cache.double()
        out = qk_norm_rope_store(
            self.qkv, KVLayer(self.cache[:, 1, 0], self.cache[:, 1, 1]),
            cos_sin=cos_sin, **weights, **same, **tuning,
        )  # fmt: skip
        exact = {name: weight.double() for name, weight in weights.items()}
        want = reference.qk_norm_rope_store(
            self.qkv.double(), KVLayer(wide[:, 1, 0], wide[:, 1, 1]), scratch=None,
            cos_sin=None if cos_sin is None else cos_sin.double(),
            q_weight=exact.get("q_weight"), k_weight=exact.get("k_weight"), **same,
        )  # fmt: skip
        assert_close(out[:4], want[:4])
        assert_close(self.cache, wide)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (80, 32), (96, 96)])
@pytest.mark.parametrize("heads_per_program", [1, 4])
def test_norm_rope_store(
    kernel_device: str, dtype: torch.dtype, dim: int, rotary: int, heads_per_program: int
) -> None:
    case = Rope(kernel_device, dtype, dim, rotary)
    case.check(case.cos_sin, case.weights, heads_per_program=heads_per_program)


@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (80, 32), (96, 96)])
def test_interleaved_rope(kernel_device: str, dim: int, rotary: int) -> None:
    case = Rope(kernel_device, torch.float32, dim, rotary)
    case.check(case.cos_sin, case.weights, interleaved=True)


def test_store_without_norm_or_rope(kernel_device: str) -> None:
    case = Rope(kernel_device, torch.float32, 64, 64)
    case.check(None, {})
    case.check(case.cos_sin, {})
