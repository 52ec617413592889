"""Kernels as a GPU's compiler sees them."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_launches_of_tests_compile() -> None:
    command = [sys.executable, "-m", "tests.ops.compile_kernels"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "kernels compile" in done.stdout
