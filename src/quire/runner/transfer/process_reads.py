"""Reads of the memory of other processes of a host, copied by Linux (`process_vm_readv`).

Neither side calls the other: the reader's thread copies, whatever the writer does. A process that
has ended has no memory, and so a read of it fails.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from quire.errors import ConfigError, QuireError
from quire.runner.transfer.engine_memory import MemoryPieces
from quire.runner.transfer.process_memory import ProcessMemory, lives, start_of
from quire.runner.transfer.remote_reads import ReadPart, RemoteReads

_MOST_PIECES = 1024
"""Pieces of a call: IOV_MAX."""
_MOST_BYTES = 1 << 30
"""Bytes of a call, which copies less than 2 GB."""
_SET_PTRACER, _ANY = 0x59616D61, -1
"""`prctl`: processes of this user may read this one's memory, where Yama restricts them."""

_decoder = msgspec.msgpack.Decoder(ProcessMemory)


class ProcessAgent(RemoteReads):
    """Lets processes of this user read this one, and reads theirs.

    Raises:
        ConfigError: the system has no such calls, or forbids them.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        super().__init__(tensors, device, "kv-ipc")
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.prctl(_SET_PTRACER, ctypes.c_long(_ANY), 0, 0, 0)
        own = ProcessMemory(os.getpid(), start_of(os.getpid()), [])
        self.metadata = msgspec.msgpack.encode(own)
        try:
            page = np.zeros(2, np.int64)
            at = np.array([page.ctypes.data])
            self._copy(os.getpid(), MemoryPieces(at, at + 8, np.array([8])))
        except (AttributeError, QuireError) as error:
            raise ConfigError(
                f"transport=ipc: one process cannot read another's memory here ({error}); use "
                "transport=tcp",
                "transport",
            ) from None
        self._start_thread()

    def _meet(self, metadata: bytes) -> ProcessMemory:
        memory = _decoder.decode(metadata)
        if not lives(memory):
            raise QuireError(
                f"the peer's process {memory.pid} is not seen here; transport=ipc needs one host "
                "and, with containers, a common namespace of processes"
            )
        return memory

    def _part(self, peer: ProcessMemory) -> None:
        pass

    def _begin(self, peer: ProcessMemory, part: ReadPart, pieces: MemoryPieces) -> ProcessMemory:
        self._copy(peer.pid, pieces)
        return peer

    def _over(self, handle: ProcessMemory) -> bool:
        if not lives(handle):  # its number may have gone to another
            raise QuireError("the peer's process has ended")
        return True

    def _copy(self, pid: int, pieces: MemoryPieces) -> None:
        """Copies pieces; raises QuireError where not all of them came."""
        at = 0
        while at < len(pieces.sizes):
            sizes = np.cumsum(pieces.sizes[at : at + _MOST_PIECES])
            end = at + max(1, int(np.searchsorted(sizes, _MOST_BYTES, side="right")))
            wanted = int(sizes[end - at - 1])
            here, there = (
                np.stack([where[at:end], pieces.sizes[at:end]], axis=1).astype(np.uint64)
                for where in (pieces.here, pieces.there)
            )
            count = ctypes.c_ulong(end - at)
            self._libc.process_vm_readv.restype = ctypes.c_ssize_t
            found = self._libc.process_vm_readv(
                ctypes.c_int(pid), here.ctypes.data_as(ctypes.c_void_p), count,
                there.ctypes.data_as(ctypes.c_void_p), count, ctypes.c_ulong(0),
            )  # fmt: skip
            if found != wanted:
                why = os.strerror(ctypes.get_errno()) if found < 0 else f"{found} bytes came"
                raise QuireError(f"process {pid}: {why}")
            at = end
