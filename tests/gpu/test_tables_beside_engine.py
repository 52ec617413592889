"""The process that measures plans on a GPU, with step counts made by the test."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.features.tuning import feature
from quire.ops.triton.products import table
from quire.ops.triton.products.plan import Shape
from quire.ops.weight import WeightFormat

INT8 = WeightFormat(torch.int8, scales=torch.float32)
SHAPES = [
    Shape(1, 3072, 2048, torch.bfloat16, norm=True),
    Shape(1, 2048, 2048, torch.bfloat16),
    Shape(1, 2048, 2048, torch.bfloat16, format=INT8),
    Shape(8, 2048, 2048, torch.bfloat16),
]


def test_plans_are_measured_between_steps_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    table.PLANS.forget()
    monkeypatch.setattr(table.chosen, "by_rules", dict(enumerate(SHAPES)))
    said: list[str] = []
    monkeypatch.setattr(feature, "_say", said.append)
    args = SimpleNamespace(gpu_memory_utilization=0.9)
    config: Any = SimpleNamespace(device="cuda", dtype="bfloat16", args=args)
    tuning = feature.TableTuning(config)
    began = time.monotonic()
    assert tuning.start(None, None) is not None  # type: ignore[arg-type]
    stop = threading.Event()

    def step() -> None:
        while not stop.wait(0.5):
            tuning.before_submit()
            time.sleep(0.02)
            tuning.after_update(0)

    threading.Thread(target=step, daemon=True).start()
    process = tuning._process
    assert process is not None
    while len(said) < 2 and time.monotonic() < began + 200:
        time.sleep(0.05)
    stop.set()
    tuning.close(None)
    sys.stdout.write("\n  ".join([f"{time.monotonic() - began:.1f} s:", *said]) + "\n")
    assert "4 of 4" in said[0]
    assert "4 plans measured" in said[1]
    table.PLANS.forget()
    entries = table.PLANS.entries(torch.cuda.get_device_name())
    for key in map(table.key_of, SHAPES):
        sys.stdout.write(f"  {key}: {entries[key].as_json()}\n")
    assert process.wait(5) == 0
