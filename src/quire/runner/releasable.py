"""Memory that an engine can give up while it sleeps, at addresses that stay.

Captured graphs hold the addresses of weights and of the KV cache. So these addresses must be valid
again after a sleep. On a GPU they are reserved by the driver's virtual memory calls. A sleep takes
the physical memory away from them, and a wake-up puts other memory there. PyTorch allocates from
the reserved addresses through a pool of its own (`torch.cuda.MemPool`), whose allocator is two
functions of this module. On a CPU the system takes the pages back, and returns pages of zeros.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.errors import QuireError
from quire.runner.pinned_memory import pinned_memory

_log = logging.getLogger("quire.engine")

_DONTNEED = 4
"""MADV_DONTNEED of Linux."""
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3
"""CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE and
CU_MEM_ACCESS_FLAGS_PROT_READWRITE."""

Span = tuple[int, int]
"""First address, and the address after the last byte."""


class ReleasableMemory(Protocol):
    """Memory of some tensors, which can be given up."""

    def allocate(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which this thread's new tensors lie in this memory."""
        ...

    def release(self, dropped: Sequence[Tensor]) -> int:
        """Gives memory up. The device must be idle.

        Args:
            dropped: tensors whose content may be lost. All other content is kept in host memory.

        Returns:
            the bytes that were given up.
        """
        ...

    def restore(self) -> None:
        """Takes memory again, at the same addresses. Content that was kept is there. All other
        bytes are zeros."""
        ...

    def close(self) -> None:
        """Gives all memory back for good. Nobody uses its tensors any more. Idempotent."""
        ...


def releasable_memory(device: torch.device, *, enabled: bool) -> ReleasableMemory:
    """Returns memory for tensors on a device.

    Args:
        enabled: whether the memory will be given up. Otherwise PyTorch allocates as usual.
    """
    return DeviceArena(device) if enabled and device.type == "cuda" else HostPages()


class DeviceBytes:
    """GPU memory at an address, for `torch.as_tensor`."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


class HostPages:
    """Memory of a CPU. Content that is kept stays where it is, in host memory."""

    @contextlib.contextmanager
    def allocate(self) -> Iterator[None]:
        yield

    def release(self, dropped: Sequence[Tensor]) -> int:
        libc, total = ctypes.CDLL(None, use_errno=True), 0
        for tensor in dropped:
            if tensor.device.type != "cpu" or not tensor.nbytes:
                continue
            # Pages at both ends may hold other data.
            low = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            high = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if tensor.is_contiguous() and low < high:
                libc.madvise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), _DONTNEED)
                total += high - low
        return total

    def restore(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_meta", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class _DriverMemory:
    """The driver's virtual memory calls for one GPU. The GPU's context is the thread's own, as
    PyTorch has set it."""

    def __init__(self, device: int) -> None:
        try:
            self._driver: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise QuireError(f"there is no CUDA driver ({error})") from None
        location = _Location(_ON_DEVICE, device)
        self._properties = _AllocationProperties(type=_PINNED, location=location)
        self._access = _Access(location, _READ_WRITE)
        unit = ctypes.c_size_t()
        self._call(
            "cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(self._properties), 0
        )
        self.unit = unit.value

    def reserve(self, size: int) -> int:
        """Reserves addresses. Returns the first one."""
        address = ctypes.c_uint64()
        self._call(
            "cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(size),
            ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_ulonglong(0),
        )  # fmt: skip
        return address.value

    def map(self, address: int, size: int) -> int:
        """Puts new memory at reserved addresses. Returns its handle."""
        handle = ctypes.c_ulonglong()
        self._call(
            "cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size),
            ctypes.byref(self._properties), ctypes.c_ulonglong(0),
        )  # fmt: skip
        try:
            self._call(
                "cuMemMap", ctypes.c_uint64(address), ctypes.c_size_t(size), ctypes.c_size_t(0),
                handle, ctypes.c_ulonglong(0),
            )  # fmt: skip
            self._call(
                "cuMemSetAccess", ctypes.c_uint64(address), ctypes.c_size_t(size),
                ctypes.byref(self._access), ctypes.c_size_t(1),
            )  # fmt: skip
        except QuireError:
            self._call("cuMemRelease", handle)
            raise
        return handle.value

    def unmap(self, address: int, size: int, handle: int) -> None:
        """Gives memory back, but keeps the addresses."""
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size))
        self._call("cuMemRelease", ctypes.c_ulonglong(handle))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorName(status, ctypes.byref(text))
            raise QuireError(f"CUDA: {name}: {(text.value or b'').decode() or status}")


@dataclass(slots=True)
class _Segment:
    """Addresses that PyTorch's pool has got.

    Attributes:
        size: bytes, in whole units of the driver.
        handle: the memory at the addresses; None while it is given up.
    """

    size: int
    handle: int | None


class DeviceArena:
    """Memory of a GPU at reserved addresses.

    The pool and its two functions live as long as the process, because PyTorch may call them at any
    time.
    """

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        torch.empty(1, device=self._device)  # Makes the context that the driver's calls use.
        self._driver = _DriverMemory(self._device.index)
        self._segments: dict[int, _Segment] = {}
        self._kept: list[tuple[Span, Tensor]] = []
        self._host = pinned_memory(self._device)
        allocate = ctypes.CFUNCTYPE(
            ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p
        )(self._allocate)
        free = ctypes.CFUNCTYPE(
            None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p
        )(self._free)
        pointers = [ctypes.cast(each, ctypes.c_void_p).value or 0 for each in (allocate, free)]
        allocator = torch._C._cuda_customAllocator(*pointers)
        self._pool = torch.cuda.MemPool(allocator)
        _keep_forever((allocate, free, allocator, self._pool))

    @contextlib.contextmanager
    def allocate(self) -> Iterator[None]:
        with torch.cuda.use_mem_pool(self._pool, self._device):
            yield

    def _allocate(self, size: int, device: int, stream: int | None) -> int:
        """Returns the address of new memory, 0 after an error. PyTorch calls it."""
        try:
            size = -(-size // self._driver.unit) * self._driver.unit
            address = self._driver.reserve(size)
            self._segments[address] = _Segment(size, self._driver.map(address, size))
        except QuireError as error:
            _log.warning("%s", error)  # PyTorch reports only that it got no memory.
            return 0
        return address

    def _free(self, address: int, size: int, device: int, stream: int | None) -> None:
        segment = self._segments.pop(address, None)
        if segment is not None and segment.handle is not None:
            self._driver.unmap(address, segment.size, segment.handle)

    def release(self, dropped: Sequence[Tensor]) -> int:
        torch.cuda.synchronize(self._device)
        lost = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in dropped if t.is_cuda)
        total = 0
        spans: list[Span] = []
        for address, segment in self._segments.items():
            spans += _gaps((address, address + segment.size), lost)
            total += segment.size
        size = sum(high - low for low, high in spans)
        self._kept = []
        for span, host in _in_chunks(spans, self._host.chunks(size)):
            host.copy_(self._bytes(span), non_blocking=True)
            self._kept.append((span, host))
        torch.cuda.synchronize(self._device)
        for address, segment in self._segments.items():
            if segment.handle is not None:
                self._driver.unmap(address, segment.size, segment.handle)
                segment.handle = None
        return total

    def restore(self) -> None:
        for address, segment in self._segments.items():
            if segment.handle is None:
                segment.handle = self._driver.map(address, segment.size)
        kept = sorted(span for span, _ in self._kept)
        for address, segment in self._segments.items():
            for span in _gaps((address, address + segment.size), kept):
                self._bytes(span).zero_()
        for span, host in self._kept:
            self._bytes(span).copy_(host, non_blocking=True)
        torch.cuda.synchronize(self._device)
        self._kept = []

    def close(self) -> None:
        for address, segment in self._segments.items():
            if segment.handle is not None:
                self._driver.unmap(address, segment.size, segment.handle)
                segment.handle = None
        self._segments = {}
        self._kept = []
        self._host.close()

    def _bytes(self, span: Span) -> Tensor:
        return torch.as_tensor(DeviceBytes(span[0], span[1] - span[0]), device=self._device)


def _gaps(whole: Span, taken: Sequence[Span]) -> Iterator[Span]:
    """Yields the parts of `whole` that no span of `taken`, in ascending order, covers."""
    at, end = whole
    for low, high in taken:
        if high <= at or low >= end:
            continue
        if low > at:
            yield at, low
        at = max(at, high)
    if at < end:
        yield at, end


def _in_chunks(spans: Iterable[Span], chunks: Iterator[Tensor]) -> Iterator[tuple[Span, Tensor]]:
    """Yields spans, cut where a chunk ends, each with a part of a chunk that has its bytes."""
    free = torch.empty(0, dtype=torch.uint8)
    for low, high in spans:
        while low < high:
            if not len(free):
                free = next(chunks)
            size = min(high - low, len(free))
            yield (low, low + size), free[:size]
            low, free = low + size, free[size:]


def _keep_forever(objects: Any) -> None:
    """Keeps objects until the process ends, also while the interpreter is shut down."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(objects))
