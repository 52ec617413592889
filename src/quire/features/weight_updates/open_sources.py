"""Opens what an update brings, on one rank."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.errors import ModelError, QuireError
from quire.features.weight_updates.broadcast_group import BroadcastGroup
from quire.features.weight_updates.payloads import (
    CudaIpcSource,
    FolderSource,
    GroupSource,
    LocalSource,
    SharedMemorySource,
    Source,
    TensorEntry,
)
from quire.models.files import DTYPES, open_file, weight_files
from quire.models.tensor_file import TensorFile
from quire.runner.releasable import DeviceBytes
from quire.runner.transfer.ipc_agent import CudaIpc

SHARED_MEMORY = Path("/dev/shm")
_MOST_DIMS = 8


@dataclass(slots=True)
class OpenSource:
    """The tensors of an update.

    Attributes:
        files: open files, or `TensorFile`s. The tensors of a group have no content here.
        stream: yields the tensors of a group, once; None: `files` have the content.
    """

    files: Sequence[Any]
    stream: Iterator[tuple[str, Tensor]] | None = None


@contextlib.contextmanager
def open_source(
    source: Source,
    device: torch.device,
    groups: Mapping[str, BroadcastGroup],
    local: Mapping[int, Mapping[str, Tensor]],
) -> Iterator[OpenSource]:
    """Opens a source for the time of a block.

    Args:
        device: this rank's device.
        groups: the groups that this rank has joined, by name.
        local: tensors of this process, by their number.

    Raises:
        ModelError: the source does not exist, or its description is invalid.
    """
    with contextlib.ExitStack() as stack:
        match source:
            case FolderSource(path):
                yield OpenSource(_open_folder(stack, Path(path)))
            case SharedMemorySource(name, tensors):
                memory = _map_segment(stack, name, pinned=device.type == "cuda")
                yield OpenSource([_tensor_file([memory], tensors)])
            case CudaIpcSource(handles, tensors):
                yield OpenSource([_tensor_file(_map_handles(stack, handles, device), tensors)])
            case GroupSource(name, tensors, src):
                if name not in groups:
                    raise ModelError(f"this engine has not joined a group {name!r}")
                shapes = {each.name: _announced(each) for each in tensors}
                stream = groups[name].receive(tensors, src)
                yield OpenSource([TensorFile(shapes)], stream)
            case LocalSource(number):
                if number not in local:
                    raise ModelError(f"this process holds no tensors of number {number}")
                yield OpenSource([TensorFile(local[number])])


def _open_folder(stack: contextlib.ExitStack, folder: Path) -> list[Any]:
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder that this rank can read")
    files = weight_files(folder)
    for file in files:
        # The pages are read while steps still run, so that these wait for copies only.
        with contextlib.suppress(OSError), file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
    return [open_file(stack, file) for file in files]


def _map_segment(stack: contextlib.ExitStack, name: str, *, pinned: bool) -> Tensor:
    """Returns the bytes of a shared memory segment, uint8, pinned for copies to a GPU."""
    name = name.removeprefix("/")
    if not name or "/" in name or name.startswith("."):
        raise ModelError(f"{name!r} is not the name of a shared memory segment")
    try:
        with (SHARED_MEMORY / name).open("r+b") as file:
            pages = mmap.mmap(file.fileno(), 0)
    except (OSError, ValueError) as error:
        raise ModelError(f"there is no shared memory segment {name!r} here ({error})") from None
    memory = torch.from_numpy(np.frombuffer(pages, dtype=np.uint8))
    if pinned:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
            stack.callback(runtime.cudaHostUnregister, memory.data_ptr())
    return memory


def _map_handles(
    stack: contextlib.ExitStack, handles: Sequence[str], device: torch.device
) -> list[Tensor]:
    """Returns the bytes of another process's allocations, uint8, each on its own GPU."""
    if device.type != "cuda":
        raise ModelError(f"CUDA IPC handles need a GPU, but this engine runs on {device}")
    driver, memory = CudaIpc(device.index or 0), []
    for handle in handles:
        try:
            base = driver.open(bytes.fromhex(handle), 0)
            stack.callback(driver.close, base)
            size = driver.allocation(base)[1]
        except (QuireError, ValueError) as error:
            raise ModelError(f"a CUDA IPC handle cannot be opened: {error}") from None
        # With this rank's device, PyTorch would copy the allocations of other GPUs as a whole.
        memory.append(torch.as_tensor(DeviceBytes(base, size)))
    return memory


def _tensor_file(memory: Sequence[Tensor], tensors: Sequence[TensorEntry]) -> TensorFile:
    """Returns views of memory as tensors.

    Raises:
        ModelError: a tensor is there twice, of unknown dtype, misaligned or outside of its memory.
    """
    found: dict[str, Tensor] = {}
    for info in tensors:
        meta = _announced(info)
        if info.name in found:
            raise ModelError(f"{info.name} is there twice")
        inside = 0 <= info.memory < len(memory) and info.offset >= 0
        end = info.offset + meta.nbytes
        if not inside or end > len(memory[info.memory]) or info.offset % meta.itemsize:
            raise ModelError(
                f"{info.name}: bytes {info.offset} to {end} are outside of memory {info.memory}, "
                f"or not aligned to {meta.itemsize} bytes"
            )
        raw = memory[info.memory][info.offset : end]
        found[info.name] = raw.view(meta.dtype).view(meta.shape)
    return TensorFile(found)


def _announced(info: TensorEntry) -> Tensor:
    """Returns a tensor of the described shape and dtype without content."""
    dtype = DTYPES.get(info.dtype)
    if dtype is None:
        raise ModelError(
            f"{info.name} has dtype {info.dtype!r}, expected one of {', '.join(DTYPES)}"
        )
    if (
        len(info.shape) > _MOST_DIMS
        or min(info.shape, default=0) < 0
        or (math.prod(info.shape) >= 2**48)
    ):
        raise ModelError(f"{info.name} has the shape {info.shape}, which no tensor can have")
    return torch.empty(info.shape, dtype=dtype, device="meta")
