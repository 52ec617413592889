"""Kernels as a GPU's compiler sees them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STATES_WITH_DRAFTS = "tests/ops/test_triton_gated_delta.py::test_drafts"
"""Launches kernels that the interpreter took once, and the compiler did not."""
STREAMING_GATES = "tests/gpu/test_streaming_gates.py"
"""Launches the kernels of a bench, which nothing else compiles without a GPU."""


@pytest.mark.parametrize(
    "tests",
    [STATES_WITH_DRAFTS, STREAMING_GATES, pytest.param("tests/ops", marks=pytest.mark.slow)],
)
def test_launches_of_tests_compile(tests: str) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.ops.compile_kernels", tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "\n0 kernels compile" not in done.stdout
    assert "kernels compile, 0 do not" in done.stdout
