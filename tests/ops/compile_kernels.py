"""Compiles the kernels that tests launch for a GPU, because the interpreter accepts more than the
compiler.

    python -m tests.ops.compile_kernels [FILE ...]     # default: every test of kernels, 3 minutes
    python -m tests.ops.compile_kernels --card sm_80   # for an older card
    python -m tests.ops.compile_kernels --gluon --machine-code   # Hopper's kernels, down to ptxas
    python -m tests.ops.compile_kernels --record FOLDER          # for `launch_code`

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
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource, CompilationError
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

import quire.ops.triton
from quire.ops.triton import launch
from tests.ops.launch_code import Code, Recorder, canonical_ir, canonical_ptx, leaves

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

    def __init__(self, *, machine_code: bool, gluon_only: bool, recorder: Recorder | None) -> None:
        self.failures: list[str] = []
        self.kernels: dict[bool, collections.Counter[str]] = {
            gluon: collections.Counter() for gluon in (False, True)
        }
        self._seen: set[str] = set()
        self._machine_code, self._gluon_only = machine_code, gluon_only
        self._recorder = recorder
        self._codes: dict[str, Code] = {}
        self._signature: dict[str, Any] = {}
        self._key = ""

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
                if self._recorder is not None:
                    self._record(self._recorder, kernel, args, options)
            except CompilationError as error:
                self._add_failure(kernel.__name__, error)
            except RuntimeError as error:
                # Passes and ptxas, whose errors also contain their input.
                self._add_failure(kernel.__name__, RuntimeError(str(error)[-2000:]))

        JITFunction.run = run
        if self._recorder is not None:
            self._watch_stages(ptx=self._recorder.ptx)
            self._watch_signatures()
        self._watch(ASTSource, gluon=False)
        self._watch(GluonASTSource, gluon=True)
        triton.runtime.driver.set_active(Driver(card))
        launch.INTERPRETED = card
        launch._cuda_traits = lambda index, pdl: card
        # One after the other: in another thread, a compilation could not name its test.
        launch.compiling = lambda workers: contextlib.nullcontext()

    def _watch(self, source_class: type[ASTSource], *, gluon: bool) -> None:
        make_ir = source_class.make_ir

        def watched(source: ASTSource, target: Any, options: Any, *more: Any) -> Any:
            key = source.hash() + (options.hash() if self._recorder else "")
            self._key = key
            if key in self._seen:
                raise StoppedError
            self._seen.add(key)
            self.kernels[gluon][source.fn.__name__] += 1
            module = make_ir(source, target, options, *more)
            if self._machine_code or self._recorder:
                return module
            raise StoppedError

        source_class.make_ir = watched

    def _watch_stages(self, *, ptx: bool) -> None:
        """Ends compilations with the code to record."""
        add_stages = CUDABackend.add_stages

        def watched(backend: CUDABackend, stages: dict[str, Any], options: Any, *more: Any) -> None:
            add_stages(backend, stages, options, *more)
            last = "ptx" if ptx else "ttir" if "ttir" in stages else "ttgir"
            make = stages[last]

            def record(source: Any, metadata: dict[str, Any]) -> None:
                made = make(source, metadata)
                code = canonical_ptx(made, metadata["shared"]) if ptx else None
                text, order = code or canonical_ir(made.str_nodebug())
                given = {**vars(options), "extern_libs": None}  # They have paths.
                self._codes[self._key] = Code(f"{given}\n{text}", order)
                raise StoppedError

            stages[last] = record

        CUDABackend.add_stages = watched

    def _watch_signatures(self) -> None:
        pack_args = JITFunction._pack_args

        def watched(kernel: JITFunction[Any], *args: Any) -> Any:
            packed = pack_args(kernel, *args)
            self._signature = packed[1]
            return packed

        JITFunction._pack_args = watched

    def _record(
        self, recorder: Recorder, kernel: JITFunction[Any], args: Any, options: dict[str, Any]
    ) -> None:
        code = self._codes.get(self._key)
        if code is None:  # It did not compile.
            return
        named = {**dict(zip(self._signature, args, strict=False)), **options}
        values = [
            part
            for name, kind in self._signature.items()
            if name in named
            for part in leaves(named[name], kind)
        ]
        test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
        recorder.add(test, kernel.__name__, code, options["grid"], values)

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
    parser.add_argument(
        "--record", type=Path, metavar="FOLDER", help="record the code of all launches in a folder"
    )
    parser.add_argument("--ptx", action="store_true", help="record PTX")
    options = parser.parse_args()
    recorder = Recorder(options.record, ptx=options.ptx) if options.record else None
    triton.knobs.compilation.disable_line_info = recorder is not None
    card = CARDS[options.card]
    gluon_tests = GLUON_TESTS if card.gluon else []
    files = options.files or [*([] if options.gluon else [TESTS]), *gluon_tests]
    for module in pkgutil.iter_modules(quire.ops.triton.__path__, f"{quire.ops.triton.__name__}."):
        if not (module.name.split(".")[-1].startswith("hopper_") and not card.gluon):
            importlib.import_module(module.name)
    compiler = Compiler(
        machine_code=options.machine_code, gluon_only=options.gluon, recorder=recorder
    )
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
    if recorder is not None:
        recorder.write()
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
