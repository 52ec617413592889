"""Products of few rows with 16-bit weights by wgmma: the parts that a CPU can test. tests/gpu runs
the kernel."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton.experimental.gluon")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU or Triton's interpreter", allow_module_level=True)

from quire.ops import RmsScale
from quire.ops.choose import Policy, use_policy
from quire.ops.triton.products.hopper_narrow import narrow, parts_of, takes
from quire.ops.triton.products.plan import LinearArgs
from quire.ops.weight import Weight, WeightFormat

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def draw(rows: int, outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> LinearArgs:
    x = torch.empty(rows, inputs, device=DEVICE, dtype=dtype)
    weight = torch.empty(outputs, inputs, device=DEVICE, dtype=dtype)
    residual = torch.empty(rows, outputs, device=DEVICE, dtype=dtype)
    return LinearArgs(x, Weight.plain(weight), residual=residual)


def test_layers_that_the_kernel_supports() -> None:
    args = draw(20, 24, 256)
    assert takes(args)
    assert takes(draw(32, 24, 264, torch.float16))
    assert not takes(draw(16, 24, 256))
    assert not takes(draw(33, 24, 256))
    assert not takes(draw(20, 24, 256, torch.float32))
    assert not takes(draw(20, 24, 260))
    assert not takes(draw(20, 24, 64))
    assert not takes(draw(20, 64 * 132, 256))
    assert not takes(replace(args, residual=None))
    assert not takes(replace(args, act="gelu"))
    norm = RmsScale(torch.ones(256, device=DEVICE, dtype=torch.bfloat16), 1e-6)
    assert not takes(replace(args, norm=norm))
    stored = Weight.empty(WeightFormat(torch.int8, scales=torch.bfloat16), 24, 256, DEVICE)
    assert not takes(replace(args, weight=stored))


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts the interpreter's multiprocessors")
def test_programs_run_at_once_and_have_two_chunks() -> None:
    assert parts_of(draw(20, 64, 4096)) == 4
    assert parts_of(draw(20, 128, 4096)) == 2
    assert parts_of(draw(20, 64, 256)) == 2
    assert parts_of(draw(20, 320, 4096)) == 0


def test_programs_are_as_many_as_parts_of_tiles() -> None:
    counters = torch.zeros(264, dtype=torch.int32, device=DEVICE)
    args = draw(30, 300, 128)
    out = torch.empty(30, 300, device=DEVICE, dtype=torch.bfloat16)
    assert narrow(args, out, 2, counters, pdl=False).grid == (10,)
    assert narrow(args, out, 9, counters, pdl=False).grid == (10,)


def test_layers_that_add_a_residual_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def product(args: LinearArgs) -> Tensor:
        asked.append(len(args.x))
        return args.x

    linear = importlib.import_module("quire.ops.triton.linear")
    module = SimpleNamespace(takes=takes, product=product)
    monkeypatch.setattr(linear, "_hopper_narrow", lambda card: module)
    weight = draw(1, 16, 256).weight

    def run(rows: int) -> None:
        x = torch.ones(rows, 256, device=DEVICE, dtype=torch.bfloat16)
        linear.linear(x, weight, residual=torch.ones_like(x[:, :16]).contiguous())

    for rows in (16, 17, 32, 33):
        run(rows)
    with use_policy(Policy(disabled=frozenset({"skinny"}))):
        run(20)
    assert asked == [17, 32]
