"""An all-reduce fused with the next norm gives the same results as the two separately."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.models import build_model, load_config, load_weights, spec_from_config
from quire.parallel import ProcessGroup, SingleGroup
from tests.models.checkpoints import make
from tests.models.harness import Harness
from tests.slow import some

PROMPTS = [[5, 17, 99, 3, 42, 7, 7, 150, 23, 8, 1, 4, 110, 77], [11], [30, 31, 32, 33, 34]]
CASES = ["qwen3-tied-bias", "qwen3-moe", "gpt2", "gemma2", "mistral-window", "llama-biases"]


class NormingGroup(SingleGroup):
    """One rank that fuses all-reduce and norm, except in steps of one token.

    Attributes:
        names: layers whose all-reduce was fused, in order.
    """

    all_reduce_norm: Any  # type: ignore[assignment]

    def __init__(self) -> None:
        self.names: list[str] = []
        self.all_reduce_norm = self._all_reduce_norm

    def _all_reduce_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, name: str
    ) -> tuple[Tensor, Tensor] | None:
        if len(x) == 1:
            return None
        self.names.append(name)
        total = x + residual
        return total, ops.rms_norm(total, weight, eps)


def logits_of(folder: Path, group: ProcessGroup) -> list[Tensor]:
    spec = spec_from_config(load_config(folder))
    model = build_model(spec, device="cpu", dtype=torch.float32, group=group)
    load_weights(model, folder, "auto")
    harness = Harness(model, padding=0)
    first, second, third = (harness.add(prompt) for prompt in PROMPTS)
    steps = [[(first, 9)], [(second, 1)], [(first, 5), (third, 4)]]
    return [logits for rows in steps for logits in harness.step(rows)]


@pytest.mark.parametrize("case", some(CASES))
def test_all_reduce_is_fused_with_the_next_norm(tmp_path: Path, case: str) -> None:
    make(tmp_path, case)
    group = NormingGroup()
    found = logits_of(tmp_path, group)
    for a, b in zip(found, logits_of(tmp_path, SingleGroup()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    plain = case not in ("gpt2", "gemma2")
    assert bool(group.names) == plain
