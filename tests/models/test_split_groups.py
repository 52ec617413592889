"""8-bit floats in groups, on ranks whose parts of a layer's inputs split groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.layers.split_groups import round_split_groups
from quire.ops.reference.quantized import round_inputs
from quire.ops.weight import Weight, WeightFormat
from quire.parallel import ProcessGroup, SingleGroup
from tests.gloo_ranks import on_ranks
from tests.models.quantized_checkpoints import make_quantized
from tests.models.test_quantized_checkpoints import loaded, logits

_FORM = WeightFormat(torch.float8_e4m3fn, scales=torch.float32, group=32, inputs="group")


class _Told(SingleGroup):
    """Records the messages a rank sends to the others, or replays the messages of all ranks."""

    def __init__(self, rank: int, world: int, answer: list[Tensor] | None = None) -> None:
        self.rank, self.world, self.answer = rank, world, answer
        self.told: Tensor | None = None

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        self.told = x
        return torch.cat([x] * self.world if self.answer is None else self.answer, dim)


@pytest.mark.parametrize(
    ("inputs", "world"), [(80, 2), (80, 4), (80, 8), (96, 2), (48, 2), (96, 8), (192, 4), (160, 2)]
)
def test_inputs_are_rounded_as_by_one_rank(inputs: int, world: int) -> None:
    x = torch.randn(5, inputs, generator=torch.Generator().manual_seed(inputs + world))
    x[3] = 0
    cpu, share = torch.device("cpu"), inputs // world
    expected = round_inputs(x, Weight.empty(_FORM, 1, inputs, cpu))
    parts, weights, told = x.split(share, 1), [], []
    for rank, part in enumerate(parts):
        weights.append(Weight.empty(_FORM, 1, share, cpu, before=rank * share, whole=inputs))
        group = _Told(rank, world)
        round_split_groups(part, weights[rank], group)
        assert group.told is not None
        told.append(group.told)
    for rank, part in enumerate(parts):
        own, weight = round_split_groups(part, weights[rank], _Told(rank, world, told))
        assert torch.equal(own, expected[:, rank * share : (rank + 1) * share])
        assert weight.format == replace(_FORM, inputs="none")


def _logits(folder: Path, group: ProcessGroup) -> Tensor:
    return logits(loaded(folder, group)).log_softmax(-1)


def test_log_probabilities_are_those_of_one_rank(tmp_path: Path) -> None:
    make_quantized(tmp_path, "fp8-blocks")
    expected = _logits(tmp_path, SingleGroup())
    for found in on_ranks(_logits, tmp_path, tmp_path):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
