"""Traits of devices, and the order of kernels in a captured step.

**Programmatic dependent launch (PDL).** A kernel launched with `launch_pdl=True` may start while
its predecessor still runs. `gdc_wait` blocks until the predecessor has finished and its writes are
visible. In every kernel here some program calls `gdc_wait`, and no program writes before its wait.
So a kernel's completion implies that of all kernels before it.

Most kernels call `gdc_launch_dependents` after their wait, so that their successor starts when
everything before them is complete. EARLY kernels call it first, and start their successor sooner. A
kernel whose predecessors are EARLY may read only weights and the step's metadata before its own
wait. Metadata is complete by then, because the kernel behind those that write it starts without PDL
(`metadata_options`)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton import AsyncCompileMode

from quire.ops.choose import current_policy


@dataclass(frozen=True)
class DeviceTraits:
    """The traits of a device that launches depend on.

    Attributes:
        capability: compute capability, such as (9, 0).
        num_sms: multiprocessors.
        shared_memory: bytes of shared memory that one program may use.
        pdl: the device has programmatic dependent launch (sm_90 and newer).
        bf16: the tensor cores support bf16 (sm_80 and newer).
    """

    capability: tuple[int, int]
    num_sms: int
    shared_memory: int
    pdl: bool
    bf16: bool

    @property
    def gluon(self) -> bool:
        """Whether the device runs the Gluon kernels, which are for Hopper cards."""
        return self.capability == (9, 0) and gluon_missing() is None


GLUON_VERSIONS = ((3, 6), (3, 9))
"""The first and the last version of Triton whose Gluon compiles the kernels. Gluon is not stable
yet. `hopper_common.py` contains the differences between versions."""


def gluon_missing(version: str = triton.__version__) -> str | None:
    """Returns why a version of Triton does not run the Gluon kernels, and which versions do.

    Returns None if it runs them."""
    own = tuple(int(part) for part in version.split(".")[:2])
    first, last = GLUON_VERSIONS
    if first <= own <= last:
        return None
    known = " to ".join(".".join(map(str, version)) for version in GLUON_VERSIONS)
    return (
        f"Triton {version} is not among {known}, which Hopper's own kernels are compiled with: "
        "attention of long prompts, weights in few bits, experts, gated layers and the gated delta "
        "rule run slower kernels; install a torch of 2.11 to 2.14 with the Triton that it names"
    )


INTERPRETED = DeviceTraits((0, 0), 4, 1 << 30, pdl=False, bf16=False)
"""Traits of CPU tensors. Kernels then run under TRITON_INTERPRET=1, whose matrix product does not
support bf16."""


@functools.cache
def _cuda_traits(index: int, pdl: bool) -> DeviceTraits:
    properties = torch.cuda.get_device_properties(index)
    limits = triton.runtime.driver.active.utils.get_device_properties(index)
    capability = (properties.major, properties.minor)
    return DeviceTraits(
        capability=capability,
        num_sms=properties.multi_processor_count,
        shared_memory=limits["max_shared_mem"],
        pdl=pdl and capability >= (9, 0),
        bf16=capability >= (8, 0),
    )


def traits(device: torch.device) -> DeviceTraits:
    """Returns the traits of a device under the current policy."""
    if device.type != "cuda":
        return INTERPRETED
    index = device.index if device.index is not None else torch.cuda.current_device()
    return _cuda_traits(index, "pdl" not in current_policy().disabled)


_metadata_written: ContextVar[bool] = ContextVar("metadata_written", default=False)


def options(pdl: bool, **rest: Any) -> dict[str, Any]:
    """Returns the keywords of a launch. `launch_pdl` is left out without PDL, because the
    interpreter does not know it."""
    if pdl and _metadata_written.get():
        _metadata_written.set(False)
        return rest
    return {**rest, "launch_pdl": True} if pdl else rest


def metadata_options(pdl: bool, **rest: Any) -> dict[str, Any]:
    """Returns the keywords of a launch that writes the step's metadata.

    The next launch that writes none starts without PDL."""
    if not pdl:
        return rest
    _metadata_written.set(True)
    return {**rest, "launch_pdl": True}


_compiling: ContextVar[bool] = ContextVar("quire_compiling", default=False)


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """Returns `kernel[grid]`, or within `compiling` a function that only compiles the kernel for
    its arguments."""
    if _compiling.get():
        return functools.partial(kernel.warmup, grid=grid)
    return kernel[grid]


@contextlib.contextmanager
def compiling(workers: int) -> Iterator[None]:
    """Makes launches within the block only compile, on `workers` threads.

    The end of the block waits for all of them. A kernel that fails to compile raises at its next
    launch."""
    token = _compiling.set(True)
    try:
        with ThreadPoolExecutor(workers) as pool, AsyncCompileMode(pool, ignore_errors=True):
            yield
    finally:
        _compiling.reset(token)
