"""The kernels of bench/kernels/streaming_gates.py: states after exchanges, and sums of boxes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from quire.ops.triton.launch import traits

sys.path.append(str(Path(__file__).parents[2] / "bench" / "kernels"))

from streaming_gates import VARIANTS, check, launch_of, work_of

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("name", [name for name in VARIANTS if not name.startswith("ceiling")])
def test_states_and_sums(name: str) -> None:
    if not traits(DEVICE).gluon:
        pytest.skip("needs a Hopper card and the Triton that its kernels are written for")
    variant = VARIANTS[name]
    work = work_of(variant, layers=3)
    launch = launch_of(variant, work)
    launch.weights.random_()
    for run in range(2):  # the second meets the words of the first
        launch.run(run * work.schedule.epochs)
        check(variant, work, launch)
