"""Memory of GPUs that processes of one host open: calls of CUDA's driver.

Allocations are shared as a whole. Whoever opens one keeps it allocated, also when its owner ends.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from quire.errors import ConfigError, QuireError
from quire.runner.transfer.copier import copy_between
from quire.runner.transfer.engine_memory import MemoryPieces
from quire.runner.transfer.process_memory import Allocation, ProcessMemory, lives, start_of
from quire.runner.transfer.remote_reads import ReadPart, RemoteReads

HANDLE_BYTES = 64
_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class CudaIpc:
    """The driver's calls, from any thread, for one GPU.

    Raises:
        QuireError: there is no driver, or a call fails.
    """

    def __init__(self, device: int) -> None:
        try:
            self._waits: Any = ctypes.CDLL("libcuda.so.1")
            # Calls that return at once, which would wait longer for the interpreter's lock.
            self._quick: Any = ctypes.PyDLL("libcuda.so.1")
        except OSError as error:
            raise QuireError(f"there is no CUDA driver ({error})") from None
        self._context = ctypes.c_void_p()
        self._check(self._waits.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), device))

    def _enter(self) -> None:
        """Makes the GPU's context, which PyTorch uses as well, that of this thread."""
        self._check(self._waits.cuCtxSetCurrent(self._context))

    def allocation(self, address: int) -> tuple[int, int]:
        """Returns where the allocation of an address begins, and its bytes."""
        self._enter()
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._check(
            self._waits.cuMemGetAddressRange_v2(
                ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
            )
        )
        return base.value, size.value

    def export(self, base: int) -> bytes:
        """Returns the handle of an allocation."""
        self._enter()
        handle = _Handle()
        self._check(self._waits.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(base)))
        return bytes(handle)

    def open(self, handle: bytes, size: int) -> int:
        """Maps another process's allocation, whatever `size` says; returns where it begins. Its GPU
        need not be visible to this process, but reachable from the one that it uses."""
        self._enter()
        address = ctypes.c_uint64()
        self._check(
            self._waits.cuIpcOpenMemHandle_v2(
                ctypes.byref(address), _Handle.from_buffer_copy(handle), _ENABLE_PEER_ACCESS
            )
        )
        return address.value

    def close(self, address: int) -> None:
        """Undoes `open`."""
        self._enter()
        self._check(self._waits.cuIpcCloseMemHandle(ctypes.c_uint64(address)))

    def stop(self) -> None:
        """Does nothing: allocations are shared as long as they live."""

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Copies memory on a stream, by the GPU's engines for copies."""
        self._check(
            self._quick.cuMemcpyAsync(
                ctypes.c_uint64(target),
                ctypes.c_uint64(source),
                ctypes.c_size_t(size),
                ctypes.c_void_p(stream),
            )
        )

    def _check(self, status: int) -> None:
        if status:
            name = ctypes.c_char_p()
            self._waits.cuGetErrorName(status, ctypes.byref(name))
            raise QuireError(f"CUDA: {(name.value or b'').decode() or status}")


# Reads of other engines' memory within a host: of GPUs by CUDA's handles for other processes, on
# a CPU by files in memory (`shared_pages.py`).

_LARGE = 1 << 18
"""Bytes of a piece from which on it is worth a call of its own."""
_ALIGN = 16
_CHECK_SECONDS = 0.5
"""Between two looks whether peers live."""


class Opener(Protocol):
    """Opens the memory of other processes; see `CudaIpc` and `SharedPages`."""

    def allocation(self, address: int) -> tuple[int, int]: ...

    def export(self, base: int) -> bytes: ...

    def open(self, handle: bytes, size: int) -> int: ...

    def close(self, address: int) -> None: ...

    def stop(self) -> None: ...


Copies = Callable[[MemoryPieces], Callable[[], bool]]
"""Copies pieces to here, from `there` in this process's addresses; tells whether that is done."""

_decoder = msgspec.msgpack.Decoder(ProcessMemory)


class OpenedMemory:
    """A peer's allocations, mapped. begins, ends: there; here: where each begins now; int64 [n]."""

    def __init__(self, memory: ProcessMemory, opener: Opener) -> None:
        self.memory = memory
        found = sorted(memory.allocations, key=lambda each: each.begin)
        self.begins = np.array([each.begin for each in found], dtype=np.int64)
        self.ends = self.begins + np.array([each.size for each in found], dtype=np.int64)
        opened: list[int] = []
        try:
            for each in found:
                opened.append(opener.open(each.handle, each.size))
        except BaseException:
            for address in opened:
                opener.close(address)
            raise
        self.here = np.array(opened, dtype=np.int64)

    def locate(self, pieces: MemoryPieces) -> MemoryPieces:
        """Returns pieces with addresses of this process. Raises QuireError where one is outside of
        what was opened."""
        at = np.searchsorted(self.begins, pieces.there, side="right") - 1
        if (at < 0).any() or (pieces.there + pieces.sizes > self.ends[at]).any():
            raise QuireError("a peer named blocks outside of its cache")
        there = pieces.there - self.begins[at] + self.here[at]
        return MemoryPieces(pieces.here, there, pieces.sizes)


class IpcAgent(RemoteReads):
    """Lets processes of this host open some tensors, and reads theirs.

    Raises:
        ConfigError: the memory cannot be opened by others.
    """

    def __init__(
        self, tensors: Sequence[Tensor], device: torch.device, opener: Opener, copies: Copies
    ) -> None:
        super().__init__(tensors, device, "kv-ipc")
        self._opener = opener
        self._copies = copies
        self._looked = 0.0
        try:
            found = {opener.allocation(t.data_ptr()) for t in tensors if t.nbytes}
            opened = [Allocation(begin, size, opener.export(begin)) for begin, size in found]
        except QuireError as error:
            raise ConfigError(
                f"transport=ipc: other processes cannot open this memory ({error}); expandable "
                "segments of PYTORCH_ALLOC_CONF must be off. Use transport=tcp",
                "transport",
            ) from None
        own = ProcessMemory(os.getpid(), start_of(os.getpid()), opened)
        self.metadata = msgspec.msgpack.encode(own)
        self._start_thread()

    def _meet(self, metadata: bytes) -> OpenedMemory:
        memory = _decoder.decode(metadata)
        if not lives(memory):
            raise QuireError(
                f"the peer's process {memory.pid} is not seen here; transport=ipc needs one host "
                "and, with containers, common namespaces of processes and IPC"
            )
        return OpenedMemory(memory, self._opener)

    def _part(self, peer: OpenedMemory) -> None:
        for address in peer.here.tolist():
            self._opener.close(address)

    def _has_room(self) -> bool:
        # One after the other, as they would run anyway: a call for a copy waits when a thousand are
        # under way, and the interpreter with it.
        return all(part.handle is None for read in self._reads for part in read.parts)

    def _begin(
        self, peer: OpenedMemory, part: ReadPart, pieces: MemoryPieces
    ) -> Callable[[], bool]:
        return self._copies(peer.locate(pieces))

    def _over(self, handle: Callable[[], bool]) -> bool:
        return handle()

    def _serve(self) -> None:
        now = time.monotonic()
        if now - self._looked > _CHECK_SECONDS:
            self._looked = now
            peers = self._peers.items()
            self._broken |= {name for name, peer in peers if not lives(peer.memory)}

    def _shut(self) -> None:
        for peer in self._peers.values():
            self._part(peer)
        self._peers.clear()
        self._opener.stop()


def open_ipc_agent(tensors: Sequence[Tensor], device: torch.device) -> RemoteReads:
    """Returns the agent of this rank.

    Raises:
        ConfigError: its memory cannot be opened by others.
    """
    if device.type != "cuda":
        # Linux has calls that others lack.
        from quire.runner.transfer.shared_pages import SharedPages, copy_now

        try:
            return IpcAgent(tensors, device, SharedPages(tensors), copy_now)
        except QuireError as error:
            raise ConfigError(
                f"transport=ipc: the KV cache cannot be shared ({error}); use transport=tcp",
                "transport",
            ) from None
    # A CPU has no driver.
    pass  # nothing left to import

    driver = CudaIpc(device.index or 0)
    return IpcAgent(tensors, device, driver, CudaCopies(driver, device))


class CudaCopies:
    """Copies pieces on a stream of its own."""

    def __init__(self, driver: Any, device: torch.device) -> None:
        self._driver = driver
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The kernel is compiled now rather than at a first read.
        page = torch.zeros(2, _ALIGN, dtype=torch.uint8, device=device)
        own = np.array([page.data_ptr()], dtype=np.int64)
        torch.cuda.synchronize(device)
        self(MemoryPieces(own + _ALIGN, own, np.array([_ALIGN])))
        self._stream.synchronize()

    def __call__(self, pieces: MemoryPieces) -> Callable[[], bool]:
        with torch.cuda.stream(self._stream):
            for size in np.unique(pieces.sizes).tolist():
                of_size = pieces.sizes == size
                self._copy(pieces.here[of_size], pieces.there[of_size], size)
            event: Any = self._stream.record_event()
        return lambda: bool(event.query())

    def _copy(self, here: Any, there: Any, size: int) -> None:
        stream = self._stream.cuda_stream
        if size >= _LARGE or size % _ALIGN:
            for target, source in zip(here.tolist(), there.tolist(), strict=True):
                self._driver.copy(target, source, size, stream)
            return
        copy_between(there, here, size, self._device)
