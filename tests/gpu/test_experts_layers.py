"""Routers and experts with the plans that are chosen, at the sizes of real models."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.ops.arguments import RmsScale
from quire.ops.experts import ExpertWeights, Routing
from quire.ops.reference import experts as twins
from quire.ops.reference.quantized import dequantize
from quire.ops.triton.experts.route import route
from quire.ops.weight import Weight

sys.path.append(str(Path(__file__).parents[2] / "bench" / "kernels"))
from experts import DEVICE, FORMATS, GPT_OSS, QWEN3, Batch, Layer, Model, copies_of, plan_of

TOKENS = (1, 8, 20, 64, 300)
MODELS = [replace(model, experts=8, top_k=4) for model in (QWEN3, GPT_OSS)]
CASES = [(MODELS[0], name) for name in FORMATS] + [(MODELS[1], n) for n in GPT_OSS.formats]


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_routes(model: Model, copied: bool, tokens: int) -> None:
    x = torch.randn(tokens, model.hidden, device=DEVICE).bfloat16()
    weight = (torch.randn(model.experts, model.hidden, device=DEVICE) / 40).bfloat16()
    norm = RmsScale(torch.rand(model.hidden, device=DEVICE).bfloat16(), 1e-6)
    live = torch.tensor([tokens - 1], dtype=torch.int32, device=DEVICE)
    args = (x, weight, Routing(top_k=model.top_k))
    copies = copies_of(model.experts) if copied else None
    found = route(*args, live=live, norm=norm, copies=copies)
    expected = twins.route(*args, live=live, norm=norm, copies=copies)
    # Scores that round differently may change places.
    same = (found.ids.sort(1).values == expected.ids.sort(1).values).all(1).float().mean()
    assert same >= 0.9
    if not copied:
        assert (found.ids[-1] < 0).all()
        assert (found.weights - expected.weights).abs().max() <= 1e-2


def exact(linear: ExpertWeights) -> ExpertWeights:
    values = dequantize(linear.weight, torch.float64)
    bias = None if linear.bias is None else linear.bias.double()
    return ExpertWeights(Weight.plain(values), linear.experts, bias)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("model", "name"), CASES, ids=lambda part: getattr(part, "name", part))
def test_experts(model: Model, name: str, tokens: int) -> None:
    layer = Layer.make(model, FORMATS[name])
    batch = Batch.draw(model, tokens, 0)
    batch.ids[-1, 0] = -1
    found = batch.run(plan_of(layer, tokens), layer)
    expected = twins.experts_mlp(
        batch.x.double(), batch.ids, batch.weights.double(), exact(layer.up), exact(layer.down),
        model.act, batch.x.double(),
    )  # fmt: skip
    assert float((found.double() - expected).norm() / expected.norm()) <= 1e-2
