"""Experts on tensor cores against the twin in float64, their inline assembly emulated on a CPU."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU or Triton's interpreter", allow_module_level=True)

from quire.ops.triton.experts.plan import ExpertsPlan, MmaTile
from quire.ops.weight import WeightFormat
from tests.ops import ptx
from tests.ops.test_triton_experts import E2M1, GPT_OSS, check
from tests.slow import slow

if not torch.cuda.is_available():
    ptx.install()

FORMATS = {
    "int4": WeightFormat(torch.uint8, bits=4, scales=torch.bfloat16, group=128),
    "int4-zeros": WeightFormat(torch.uint8, bits=4, scales=torch.float16, group=128, zeros=True),
    "mxfp4": E2M1,
    "int8": WeightFormat(torch.int8, scales=torch.float32),
}
EACH = ExpertsPlan("gemv", MmaTile(1, 0, 2, 1, early=True), MmaTile(1, 0, 2, 2))
SORTED = ExpertsPlan("grouped", MmaTile(2, 1, 2, 1, early=True), MmaTile(1, 1, 1, 2))
WIDE = ExpertsPlan("grouped", MmaTile(2, 2, 1, 2), MmaTile(2, 2, 2, 1))


QUICK = ("int4-zeros", "int8")
NAMES = [name if name in QUICK else slow(name) for name in FORMATS]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [1, slow(3)])
def test_each_assignment_by_itself(name: str, tokens: int) -> None:
    check(EACH, FORMATS[name], torch.bfloat16, tokens, hidden=160, width=96)


@pytest.mark.parametrize("name", NAMES)
def test_sorted_assignments(name: str) -> None:
    check(SORTED, FORMATS[name], torch.bfloat16, 6, hidden=64, width=160)


@pytest.mark.parametrize("name", ["mxfp4", slow("int4-zeros"), slow("int8")])
@pytest.mark.parametrize("plan", [EACH, SORTED, slow(WIDE)], ids=["each", "sorted", "wide"])
def test_clamped_units_and_biases(name: str, plan: ExpertsPlan) -> None:
    few = 1 if plan is EACH else 20 if plan is WIDE else 6
    check(plan, FORMATS[name], torch.bfloat16, few, act=GPT_OSS, bias=True, hidden=64, width=160)


@pytest.mark.parametrize(
    "name", ["int4-zeros", *(slow(name) for name in FORMATS if name not in ("mxfp4", "int4-zeros"))]
)
@pytest.mark.parametrize("plan", [EACH, slow(WIDE)], ids=["each", "wide"])
def test_fp16(name: str, plan: ExpertsPlan) -> None:
    check(plan, FORMATS[name], torch.float16, 2 if plan is EACH else 24, hidden=128, width=64,
          residual=False)  # fmt: skip
