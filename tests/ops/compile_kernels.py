"""Compiles the kernels that tests launch for a GPU, because the interpreter accepts more than the
compiler.

    python -m tests.ops.compile_kernels [FILE ...]     # default: every test of kernels, 3 minutes
    python -m tests.ops.compile_kernels --card sm_80   # for an older card
    python -m tests.ops.compile_kernels --gluon --machine-code   # Hopper's kernels, down to ptxas

Each launch of those tests goes through the front end of Triton's compiler, by default for a Hopper
card, and runs nothing; no GPU is needed. Results of the tests are ignored. Prints every launch that
does not compile, and fails if there is one. On cards before sm_89, kernels with 8-bit floats do not
compile, and layers do not launch them. `PYTHONPATH` chooses another Triton than the installed one.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import os
import pkgutil
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError
from triton.experimental.gluon._runtime import GluonASTSource
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
GLUON_TESTS = [
    *(TESTS / f"test_{name}.py" for name in ("hopper_gemm", "triton_quantized")),
    *(
        TESTS.parent / "gpu" / f"test_{name}.py"
        for name in (
            "experts_ring", "gated_delta", "narrow_products", "prefill_attention",
            "quantized_products", "streaming_gates",
        )
    ),
]  # fmt: skip
"""Tests that launch every kernel in Gluon. The tests under `gpu` get tensors of the CPU here."""


class StoppedError(Exception):
    """Ends a compilation after the front end."""


class Driver:
    """A stand-in for the driver of a missing card."""

    def __init__(self, card: launch.DeviceTraits) -> None:
        major, minor = card.capability
        self._target = GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


class TensorsOnCpu(TorchFunctionMode):
    """Creates on the CPU the tensors that tests create on a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def moved(value: Any) -> Any:
            on_gpu = isinstance(value, str | torch.device) and str(value).startswith("cuda")
            return "cpu" if on_gpu else value

        if func is not torch.device:
            args, kwargs = map(moved, args), {k: moved(v) for k, v in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def innermost(error: BaseException) -> BaseException:
    """Returns the cause of an error: a kernel's error names only the kernel's call."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


class Compiler:
    """Replaces launches, and counts the compiled kernels.

    Attributes:
        failures: the compiler's errors.
        kernels: number of compilations by kernel, for kernels in Triton and in Gluon.
    """

    def __init__(self, *, machine_code: bool, gluon_only: bool) -> None:
        self.failures: list[str] = []
        self.kernels: dict[bool, collections.Counter[str]] = {
            gluon: collections.Counter() for gluon in (False, True)
        }
        self._seen: set[str] = set()
        self._machine_code, self._gluon_only = machine_code, gluon_only

    @property
    def compiled(self) -> int:
        return sum(sum(names.values()) for names in self.kernels.values()) - len(self.failures)

    def install(self, card: launch.DeviceTraits) -> None:
        run_kernel = JITFunction.run

        def run(kernel: JITFunction[Any], *args: Any, **options: Any) -> None:
            if self._gluon_only and not kernel.is_gluon():
                return
            try:
                run_kernel(kernel, *args, **{**options, "warmup": True})
            except StoppedError:
                pass
            except CompilationError as error:
                self._add_failure(kernel.__name__, error)
            except RuntimeError as error:
                # Passes and ptxas, whose errors also contain their input.
                self._add_failure(kernel.__name__, RuntimeError(str(error)[-2000:]))

        JITFunction.run = run
        self._watch(ASTSource, gluon=False)
        self._watch(GluonASTSource, gluon=True)
        triton.runtime.driver.set_active(Driver(card))
        launch.INTERPRETED = card
        launch._cuda_traits = lambda index, pdl: card
        # One after the other: in another thread, a compilation could not name its test.
        launch.compiling = lambda workers: contextlib.nullcontext()

    def _watch(self, source_class: type[ASTSource], *, gluon: bool) -> None:
        make_ir = source_class.make_ir

        def watched(source: ASTSource, *args: Any, **options: Any) -> Any:
            key = source.hash()
            if key in self._seen:
                raise StoppedError
            self._seen.add(key)
            self.kernels[gluon][source.fn.__name__] += 1
            module = make_ir(source, *args, **options)
            if self._machine_code:
                return module
            raise StoppedError

        source_class.make_ir = watched

    def _add_failure(self, kernel: str, error: BaseException) -> None:
        test = os.environ["PYTEST_CURRENT_TEST"]
        self.failures.append(f"{kernel} of {test}: {innermost(error)}")


def skip_checks() -> None:
    """Lets tests continue to their next launch, because there are no computed results to check."""
    torch.testing.assert_close = lambda *args, **options: None
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *args: (9, 0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("files", nargs="*")
    parser.add_argument("--card", choices=CARDS, default="sm_90")
    parser.add_argument("--gluon", action="store_true", help="only kernels in Gluon")
    parser.add_argument(
        "--machine-code", action="store_true", help="behind the front end: passes, LLVM, ptxas"
    )
    options = parser.parse_args()
    card = CARDS[options.card]
    gluon_tests = GLUON_TESTS if card.gluon else []
    files = options.files or [*([] if options.gluon else [TESTS]), *gluon_tests]
    for module in pkgutil.iter_modules(quire.ops.triton.__path__, f"{quire.ops.triton.__name__}."):
        if not (module.name.split(".")[-1].startswith("hopper_") and not card.gluon):
            importlib.import_module(module.name)
    compiler = Compiler(machine_code=options.machine_code, gluon_only=options.gluon)
    compiler.install(card)
    skip_checks()
    os.environ["TRITON_INTERPRET"] = "1"  # Kernels' tests are skipped without.
    triton.knobs.runtime.interpret = False
    own = TESTS / "test_compile_kernels.py"  # which runs this
    common = ["-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:schemathesis"]
    # A kernel that an earlier run has compiled would not be compiled again.
    with tempfile.TemporaryDirectory() as cache, triton.knobs.cache.scope(), TensorsOnCpu():
        triton.knobs.cache.dir = cache
        pytest.main(
            [*common, "-o", "addopts=", f"--ignore={own}", "--assert=plain", *map(str, files)]
        )
    gluon = compiler.kernels[True]
    lines = [
        f"{compiler.compiled} kernels compile, {len(compiler.failures)} do not "
        f"(Triton {triton.__version__}, {options.card})",
        "in Gluon: " + ", ".join(f"{name} {gluon[name]}" for name in sorted(gluon)),
    ]
    sys.stdout.write("\n".join(["", *lines, *compiler.failures, ""]))
    return 1 if compiler.failures or not compiler.compiled else 0


if __name__ == "__main__":
    # Without assertions, so that a test goes on to its next launch.
    if not sys.flags.optimize:
        os.execv(sys.executable, [sys.executable, "-O", "-m", __spec__.name, *sys.argv[1:]])
    sys.exit(main())
