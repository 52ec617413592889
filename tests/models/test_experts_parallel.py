"""Two ranks that split experts by width, or divide whole experts, give the tokens of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config import EngineArgs
from quire.engine.builder import resolve
from quire.errors import ConfigError
from quire.features.expert_balance.balanced_experts import ENOUGH, BalancedExperts
from quire.features.expert_balance.placement import imbalance
from quire.layers.experts import Experts
from quire.models import (
    Decoder,
    build_model,
    load_config,
    load_weights,
    model_quantization,
    spec_from_config,
)
from quire.parallel import ProcessGroup, SingleGroup
from quire.runner import ModelRunner
from tests.gloo_ranks import on_ranks
from tests.models.checkpoints import make
from tests.models.harness import Harness
from tests.models.quantized_checkpoints import make_quantized
from tests.models.test_parallel import PROMPTS, Ranked

CASES = ["qwen3-moe", "glm4-moe", "gpt-oss"]
QUANTIZED = ["mxfp4"]
"""Formats of qwen3-moe, whose nine experts two ranks do not share evenly; which weights ranks hold
in others `test_quantized_experts.py` checks. Other cases have groups of experts, sigmoid scores, a
shared expert, and biases."""


def all_tokens(folders: list[Path], group: ProcessGroup) -> dict[str, list[list[int]]]:
    found = {}
    for folder in folders:
        config = load_config(folder)
        spec = spec_from_config(config)
        quantization = model_quantization(folder, config, spec, None)
        for whole in (False, True) if folder.name == "qwen3-moe" else (True,):
            model = build_model(
                spec, device="cpu", dtype=torch.float32, group=group, quantization=quantization,
                expert_parallel=whole,
            )  # fmt: skip
            load_weights(model, folder)
            name = f"{folder.name}, {'whole' if whole else 'cut'} experts"
            found[name] = Harness(model).generate(PROMPTS, 8, chunk=5)
        if group.world > 1:
            rearrange_copies(model)
        found[f"{folder.name}, copies"] = (
            found[name] if group.world == 1 else Harness(model).generate(PROMPTS, 8, chunk=5)
        )
    return found


def rearrange_copies(model: Decoder) -> None:
    """Gives ranks three copies of experts per layer and places them twice, each time as if tokens
    had chosen experts of a single rank."""
    for module in model.modules():
        if not isinstance(module, Experts):
            continue
        layer, loads = BalancedExperts(module, 3), module.router.copies.loads
        for _ in range(2):
            before = layer.placement
            first, second = map(set, before)
            alone = max(first - second, second - first, key=len)
            loads.fill_(1)
            loads[sorted(alone)] = 10
            assert imbalance(loads.tolist(), before) > ENOUGH
            layer.rearrange()
            assert not loads.any()
            assert layer.placement != before
        assert layer.stats.moves > 0
        assert layer.stats.most_work > ENOUGH * layer.stats.mean_work


def test_two_ranks_give_the_tokens_of_one(tmp_path: Path) -> None:
    folders = [tmp_path / case for case in CASES + QUANTIZED]
    for folder in folders:
        if folder.name in QUANTIZED:
            make_quantized(folder, folder.name, "qwen3-moe")
        else:
            make(folder, folder.name)
    expected = all_tokens(folders, SingleGroup())

    found = on_ranks(all_tokens, folders, tmp_path)
    for name, tokens in expected.items():
        assert found[0][name] == found[1][name] == tokens, name


def test_ranks_hold_whole_units(tmp_path: Path) -> None:
    """A width of 40 is two units of 16 and a half; nine experts are four and five."""
    make(tmp_path, "qwen3-moe")
    spec = spec_from_config(load_config(tmp_path))
    sizes = [[], []]
    for rank in range(2):
        for whole in (False, True):
            model = build_model(spec, device="meta", group=Ranked(rank, 2), expert_parallel=whole)
            sizes[rank].append(tuple(model.layers[0].mlp.up.weight.values.shape))
    assert sizes == [[(9 * 2 * 16, 48), (4 * 80, 48)], [(9 * 2 * 24, 48), (5 * 80, 48)]]
    with pytest.raises(ConfigError, match="cannot be split over 99 ranks"):
        spec.layers[0].ffn.layer(48, _build(Ranked(0, 99)))


def test_the_setting_reaches_the_model(tmp_path: Path) -> None:
    make(tmp_path, "qwen3-moe")
    args = EngineArgs(
        model=str(tmp_path), device="cpu", skip_tokenizer_init=True, num_kv_blocks=64,
        tensor_parallel_size=2, enable_expert_parallel=True,
    )  # fmt: skip
    runner = ModelRunner(resolve(args), group=Ranked(1, 2))
    runner.measure()
    assert runner.model.layers[0].mlp.up.shard.experts == (4, 9)


def _build(group: ProcessGroup) -> Any:
    from quire.layers.build import Build
    from quire.quantization import Unquantized

    return Build(group, Unquantized(), torch.device("meta"), torch.float32)
