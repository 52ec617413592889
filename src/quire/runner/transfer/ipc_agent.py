"""Reads of GPU memory between processes of one host, by CUDA's interprocess handles.

An allocation is shared as a whole. A process that opens an allocation keeps it alive, even after
the owner has ended.
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
from quire.runner.transfer.process_memory import Allocation, ProcessMemory, is_alive, start_time
from quire.runner.transfer.remote_reads import ReadPart, RemoteReads

HANDLE_BYTES = 64
_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class CudaIpc:
    """The driver's calls for one GPU, from any thread.

    Raises:
        QuireError: there is no driver, or a call fails.
    """

    def __init__(self, device: int) -> None:
        try:
            self._waits: Any = ctypes.CDLL("libcuda.so.1")
            # `PyDLL` keeps the interpreter's lock. These calls return at once, and taking the lock
            # again would take longer.
            self._quick: Any = ctypes.PyDLL("libcuda.so.1")
        except OSError as error:
            raise QuireError(f"there is no CUDA driver ({error})") from None
        self._context = ctypes.c_void_p()
        self._check(self._waits.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), device))

    def _enter(self) -> None:
        """Makes the GPU's primary context, which PyTorch uses too, this thread's context."""
        self._check(self._waits.cuCtxSetCurrent(self._context))

    def allocation(self, address: int) -> tuple[int, int]:
        """Returns the base address and the bytes of the allocation that holds an address."""
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
        """Maps another process's allocation. Returns its base address in this process.

        This process's GPU must be able to reach the allocation's GPU. `CUDA_VISIBLE_DEVICES` need
        not name that GPU. `size` is ignored, because the handle contains it.
        """
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
        """Copies memory on a stream, by the GPU's copy engines."""
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


# The agent. On a CPU, memory is shared as files in memory (`shared_pages.py`).

_LARGE = 1 << 18
"""Pieces of at least this many bytes are copied by one call each. One kernel copies all smaller
pieces."""
_ALIGN = 16
_CHECK_SECONDS = 0.5
"""Seconds between two checks whether peers are alive."""


class Opener(Protocol):
    """Opens the memory of other processes; see `CudaIpc` and `SharedPages`."""

    def allocation(self, address: int) -> tuple[int, int]: ...

    def export(self, base: int) -> bytes: ...

    def open(self, handle: bytes, size: int) -> int: ...

    def close(self, address: int) -> None: ...

    def stop(self) -> None: ...


Copies = Callable[[MemoryPieces], Callable[[], bool]]
"""Begins to copy pieces, all at addresses of this process. Returns a function that returns whether
the copy is done."""

_decoder = msgspec.msgpack.Decoder(ProcessMemory)


class OpenedMemory:
    """A peer's allocations, mapped into this process.

    Attributes:
        begins: base addresses in the peer, int64 [n].
        ends: end addresses in the peer, int64 [n].
        local: base addresses in this process, int64 [n].
    """

    def __init__(self, memory: ProcessMemory, opener: Opener) -> None:
        self.memory = memory
        allocations = sorted(memory.allocations, key=lambda each: each.begin)
        self.begins = np.array([each.begin for each in allocations], dtype=np.int64)
        self.ends = self.begins + np.array([each.size for each in allocations], dtype=np.int64)
        opened: list[int] = []
        try:
            for each in allocations:
                opened.append(opener.open(each.handle, each.size))
        except BaseException:
            for address in opened:
                opener.close(address)
            raise
        self.local = np.array(opened, dtype=np.int64)

    def locate(self, pieces: MemoryPieces) -> MemoryPieces:
        """Returns pieces with addresses of this process only.

        Raises:
            QuireError: a piece is outside the peer's allocations.
        """
        at = np.searchsorted(self.begins, pieces.remote, side="right") - 1
        if (at < 0).any() or (pieces.remote + pieces.sizes > self.ends[at]).any():
            raise QuireError("a peer named blocks outside of its cache")
        remote = pieces.remote - self.begins[at] + self.local[at]
        return MemoryPieces(pieces.local, remote, pieces.sizes)


class IpcAgent(RemoteReads):
    """Lets other processes of this host open some tensors, and reads those processes' tensors.

    Raises:
        ConfigError: other processes cannot open the memory.
    """

    def __init__(
        self, tensors: Sequence[Tensor], device: torch.device, opener: Opener, copies: Copies
    ) -> None:
        super().__init__(tensors, device, "kv-ipc")
        self._opener = opener
        self._copies = copies
        self._looked = 0.0
        try:
            allocations = {opener.allocation(t.data_ptr()) for t in tensors if t.nbytes}
            opened = [Allocation(begin, size, opener.export(begin)) for begin, size in allocations]
        except QuireError as error:
            raise ConfigError(
                f"transport=ipc: other processes cannot open this memory ({error}); expandable "
                "segments of PYTORCH_ALLOC_CONF must be off. Use transport=tcp",
                "transport",
            ) from None
        own = ProcessMemory(os.getpid(), start_time(os.getpid()), opened)
        self.metadata = msgspec.msgpack.encode(own)
        self._start_thread()

    def _connect(self, metadata: bytes) -> OpenedMemory:
        memory = _decoder.decode(metadata)
        if not is_alive(memory):
            raise QuireError(
                f"the peer's process {memory.pid} is not visible here; transport=ipc needs one "
                "host and, with containers, shared PID and IPC namespaces"
            )
        return OpenedMemory(memory, self._opener)

    def _disconnect(self, peer: OpenedMemory) -> None:
        for address in peer.local.tolist():
            self._opener.close(address)

    def _has_room(self) -> bool:
        # Reads run one after the other on the GPU anyway. With a thousand copies under way, the
        # driver would block the call for the next one, and with it the interpreter.
        return all(part.handle is None for read in self._reads for part in read.parts)

    def _begin(
        self, peer: OpenedMemory, part: ReadPart, pieces: MemoryPieces
    ) -> Callable[[], bool]:
        return self._copies(peer.locate(pieces))

    def _done(self, handle: Callable[[], bool]) -> bool:
        return handle()

    def _serve(self) -> None:
        now = time.monotonic()
        if now - self._looked > _CHECK_SECONDS:
            self._looked = now
            peers = self._peers.items()
            self._broken |= {name for name, peer in peers if not is_alive(peer.memory)}

    def _shut(self) -> None:
        for peer in self._peers.values():
            self._disconnect(peer)
        self._peers.clear()
        self._opener.stop()


def open_ipc_agent(tensors: Sequence[Tensor], device: torch.device) -> RemoteReads:
    """Returns the agent of this rank.

    Raises:
        ConfigError: other processes cannot open its memory.
    """
    if device.type != "cuda":
        # Imported here because it needs system calls that only Linux has.
        from quire.runner.transfer.shared_pages import SharedPages, copy_now

        try:
            return IpcAgent(tensors, device, SharedPages(tensors), copy_now)
        except QuireError as error:
            raise ConfigError(
                f"transport=ipc: the KV cache cannot be shared ({error}); use transport=tcp",
                "transport",
            ) from None
    driver = CudaIpc(device.index or 0)
    return IpcAgent(tensors, device, driver, CudaCopies(driver, device))


class CudaCopies:
    """Copies pieces on a stream of its own."""

    def __init__(self, driver: Any, device: torch.device) -> None:
        self._driver = driver
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Compiles the kernel, so that the first read does not have to.
        page = torch.zeros(2, _ALIGN, dtype=torch.uint8, device=device)
        own = np.array([page.data_ptr()], dtype=np.int64)
        torch.cuda.synchronize(device)
        self(MemoryPieces(own + _ALIGN, own, np.array([_ALIGN])))
        self._stream.synchronize()

    def __call__(self, pieces: MemoryPieces) -> Callable[[], bool]:
        with torch.cuda.stream(self._stream):
            for size in np.unique(pieces.sizes).tolist():
                of_size = pieces.sizes == size
                self._copy(pieces.local[of_size], pieces.remote[of_size], size)
            event: Any = self._stream.record_event()
        return lambda: bool(event.query())

    def _copy(self, local: Any, remote: Any, size: int) -> None:
        stream = self._stream.cuda_stream
        if size >= _LARGE or size % _ALIGN:
            for target, source in zip(local.tolist(), remote.tolist(), strict=True):
                self._driver.copy(target, source, size, stream)
            return
        copy_between(remote, local, size, self._device)
