"""Ops of fixed order on a CPU: a token's bits do not depend on its batch, and are near a twin's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.ops import Policy, use_policy
from quire.ops.fixed.products import INPUTS, ROWS, products
from quire.ops.reference import dense
from quire.ops.reference import dense as smooth


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("inputs", [1, 6, 33, INPUTS, INPUTS + 40])
def test_neither_rows_nor_outputs_change_a_sum(inputs: int) -> None:
    x, weight = noise(40, inputs), noise(150, inputs, seed=1)
    whole = products(x, weight)
    torch.testing.assert_close(whole, x @ weight.t(), atol=2e-4, rtol=1e-4)
    for rows in (1, 3, ROWS, 17):
        for first, end in ((0, 1), (7, 20), (3, 67), (0, 150), (149, 150)):
            part = products(x[5 : 5 + rows], weight[first:end])
            assert torch.equal(part, whole[5 : 5 + rows, first:end]), (rows, first, end)


@pytest.mark.parametrize("name", ["sigmoid", "silu", "softplus", "gelu", "gelu_tanh"])
def test_functions_do_not_depend_on_the_place(name: str) -> None:
    function, x = getattr(smooth, name), 4 * noise(2000)
    whole = function(x)
    for size in (1, 7, 20):
        parts = [function(part.clone()) for part in x.split(size)]
        assert torch.equal(torch.cat(parts), whole)
    plain = {"gelu_tanh": lambda t: torch.nn.functional.gelu(t, approximate="tanh")}
    expected = plain.get(name) or getattr(torch.nn.functional, name)
    torch.testing.assert_close(whole, expected(x), atol=3e-6, rtol=1e-5)
    ends = function(torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4]))
    assert ends.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("act", ["silu_and_mul", "gelu", "gelu_tanh_and_mul"])
def test_linear(dtype: torch.dtype, act: ops.Activation) -> None:
    x, weight = noise(9, 40).to(dtype), ops.Weight.plain(noise(24, 40, seed=1).to(dtype))
    bias, width = noise(24, seed=2).to(dtype), 12 if act.endswith("mul") else 24
    residual = noise(9, width, seed=3).to(dtype)
    norm = ops.RmsScale(noise(40, seed=4).to(dtype), 1e-6)
    with use_policy(Policy(deterministic=True)):
        found = ops.linear(x, weight, bias, residual, norm, act)
        one = ops.linear(x[4:5], weight, bias, residual[4:5], norm, act)
    assert torch.equal(found[4:5], one)
    expected = dense.linear(x, weight, bias, residual.clone(), norm, act)
    loose = 3e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(found, expected, atol=loose * 4, rtol=loose)
