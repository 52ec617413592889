"""Insane weights end the start with an error that has their name in the checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from quire.errors import ModelError
from quire.layers.expert_weights import ExpertLinear
from quire.layers.linear import Linear
from quire.models import Decoder, build_model, spec_from_config
from quire.models.config import family_named
from quire.models.sanity import check_weights
from quire.quantization import quantization_of

DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
EXPERTS: dict[str, Any] = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 80,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}


def rounded(config: dict[str, Any], kind: str) -> Decoder:
    """Returns a model of random weights, quantized."""
    torch.manual_seed(0)
    model = build_model(
        spec_from_config(config),
        device="cpu",
        dtype=torch.float32,
        quantization=quantization_of(kind),
    )
    for layer in model.modules():
        if isinstance(layer, Linear | ExpertLinear):
            for part in layer.slices():
                part.write(torch.randn(part.shape) * 0.02, 0)
    model.finish()
    return model


@pytest.fixture(scope="module", params=[(DENSE, "int4"), (DENSE, "fp8"), (EXPERTS, "int4")])
def model(request: pytest.FixtureRequest) -> Decoder:
    return rounded(*request.param)


def problem(model: Decoder) -> str:
    family = family_named(model.spec.family)
    assert family is not None
    with pytest.raises(ModelError) as found:
        check_weights(model, family)
    return str(found.value)


def part_of(model: nn.Module, name: str, start: int, end: int) -> Any:
    layer: Any = model.get_submodule(name)
    return layer.weight.rows(start, end)


def test_sane_weights_are_accepted(model: Decoder) -> None:
    family = family_named(model.spec.family)
    assert family is not None
    check_weights(model, family)


ONE_PROJECTION: list[tuple[Callable[[Any], object], str]] = [
    (lambda weight: weight.scales.fill_(torch.inf), "has weights that are not finite"),
    (lambda weight: weight.scales.fill_(3e4), "as large as"),
    (lambda weight: weight.scales.zero_(), "is zero throughout"),
]


@pytest.mark.parametrize(("spoil", "message"), ONE_PROJECTION)
@pytest.mark.parametrize("kind", ["int4", "fp8", "int8"])
def test_a_broken_projection_of_a_stacked_weight_is_named(
    kind: str, spoil: Callable[[Any], object], message: str
) -> None:
    model = rounded(DENSE, kind)
    # The second of q, k and v.
    spoil(part_of(model, "layers.1.attention.qkv", 128, 192))
    assert problem(model).startswith("model.layers.1.self_attn.k_proj ")
    assert message in problem(model)


def test_zero_points_that_are_off_by_one() -> None:
    model = rounded(DENSE, "int4")
    zeros = part_of(model, "layers.0.mlp.up", 192, 384).zeros
    zeros.add_(3)
    assert "model.layers.0.mlp.up_proj has weights whose mean is" in problem(model)


def test_a_fixed_scale_of_inputs() -> None:
    model = rounded(DENSE, "int8")
    layer: Any = model.get_submodule("layers.0.mlp.down")
    (stack,) = layer.stacks
    huge = copy.copy(stack.weight)
    object.__setattr__(huge, "input_scale", torch.tensor([1e6]))
    object.__setattr__(stack, "weight", huge)
    assert "model.layers.0.mlp.down_proj has a static input scale of 1e+06" in problem(model)


def test_one_broken_expert_is_named() -> None:
    model = rounded(EXPERTS, "int4")
    # Expert 70's second projection, which is outside the first group of checked experts.
    place = (70 * 2 + 1) * 64
    weight = part_of(model, "layers.1.mlp.up", place, place + 64)
    weight.scales.zero_()
    family = family_named(model.spec.family)
    assert family is not None
    check_weights(model, family)  # one that was never chosen
    weight.scales.fill_(3e4)
    assert problem(model).startswith("model.layers.1.mlp.experts.70.up_proj has outputs whose")
