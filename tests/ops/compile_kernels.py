"""Compiles for a GPU what tests of kernels launch: the interpreter takes more than the compiler.

    python -m tests.ops.compile_kernels [FILE ...]     # default: every test of kernels, 3 minutes
    python -m tests.ops.compile_kernels --card sm_80   # for an older card

Each launch of those tests goes through the front end of Triton's compiler, by default for a Hopper
card, and runs nothing; no GPU is needed. What the tests find is not looked at, and what comes
behind a failed assertion is not launched. Prints every launch that does not compile, and fails if
there is one. On cards before sm_89 those over 8-bit floats do not, and layers launch none of them.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
from pathlib import Path
from typing import Any, NoReturn

os.environ["TRITON_INTERPRET"] = "0"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError
from triton.runtime.jit import JITFunction

import quire.ops.triton
from quire.ops.triton import launch

CARDS = {
    "sm_75": launch.DeviceTraits((7, 5), 40, 65_536, pdl=False, bf16=False),
    "sm_80": launch.DeviceTraits((8, 0), 108, 166_912, pdl=False, bf16=True),
    "sm_89": launch.DeviceTraits((8, 9), 142, 101_376, pdl=False, bf16=True),
    "sm_90": launch.DeviceTraits((9, 0), 132, 232_448, pdl=True, bf16=True),
}
TESTS = Path(__file__).parent


class StoppedError(Exception):
    """Ends a compilation behind the front end."""


class Driver:
    """Stands for the driver of a card that is not there."""

    def __init__(self, card: launch.DeviceTraits) -> None:
        major, minor = card.capability
        self._target = GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def innermost(error: BaseException) -> BaseException:
    """Returns what an error came of: a kernel's error names only what the kernel called."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


class FrontEnd:
    """Stands for launches, and counts what has compiled. failures: what the compiler says."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self._seen: set[str] = set()
        self._run, self._make_ir = JITFunction.run, ASTSource.make_ir

    @property
    def compiled(self) -> int:
        return len(self._seen) - len(self.failures)

    def install(self, card: launch.DeviceTraits) -> None:
        def run(kernel: JITFunction[Any], *args: Any, **options: Any) -> None:
            try:
                self._run(kernel, *args, **{**options, "warmup": True})
            except StoppedError:
                pass
            except CompilationError as error:
                test = os.environ["PYTEST_CURRENT_TEST"]
                self.failures.append(f"{kernel.__name__} of {test}: {innermost(error)}")

        def make_ir(source: ASTSource, *args: Any, **options: Any) -> NoReturn:
            key = source.hash()
            if key not in self._seen:
                self._seen.add(key)
                self._make_ir(source, *args, **options)
            raise StoppedError

        JITFunction.run, ASTSource.make_ir = run, make_ir
        triton.runtime.driver.set_active(Driver(card))
        launch.INTERPRETED = card


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("files", nargs="*", default=[str(TESTS)])
    parser.add_argument("--card", choices=CARDS, default="sm_90")
    options = parser.parse_args()
    card = CARDS[options.card]
    for module in pkgutil.iter_modules(quire.ops.triton.__path__, f"{quire.ops.triton.__name__}."):
        if not (module.name.split(".")[-1].startswith("hopper_") and not card.gluon):
            importlib.import_module(module.name)
    front_end = FrontEnd()
    front_end.install(card)
    os.environ["TRITON_INTERPRET"] = "1"  # Kernels' tests are skipped without.
    triton.knobs.runtime.interpret = False
    own = TESTS / "test_compile_kernels.py"  # which runs this
    common = ["-q", "--tb=no", "-p", "no:cacheprovider", "-o", "addopts=", f"--ignore={own}"]
    pytest.main([*common, *options.files])
    lines = [f"{front_end.compiled} kernels compile, {len(front_end.failures)} do not"]
    sys.stdout.write("\n".join(["", *lines, *front_end.failures, ""]))
    return 1 if front_end.failures else 0


if __name__ == "__main__":
    sys.exit(main())
