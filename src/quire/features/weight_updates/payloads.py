"""Descriptions of the tensors of an update, and of the place where they lie.

A description is data. It travels from a trainer over the server and the engine's process to every
rank, as JSON or MessagePack. No pickled object is ever read.
"""

from __future__ import annotations

import msgspec


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor of an update.

    Attributes:
        name: its name in the checkpoint.
        dtype: as in safetensors files: "F32", "BF16", "F16", "F8_E4M3", "U8" and so on.
        shape: the shape of the whole tensor.
        offset: offset of its first byte in its memory. Its elements are contiguous.
        memory: index of its memory, for several CUDA allocations.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0
    memory: int = 0


class FolderSource(msgspec.Struct, frozen=True, tag="folder"):
    """safetensors files in a folder that every rank can read.

    Attributes:
        path: the folder. Its files may hold some of the checkpoint's tensors; others stay.
    """

    path: str


class SharedMemorySource(msgspec.Struct, frozen=True, tag="shared_memory"):
    """A POSIX shared memory segment of a process on the host of all ranks.

    Attributes:
        name: the segment's name, as `multiprocessing.shared_memory` gives it.
        tensors: the tensors in it.
    """

    name: str
    tensors: tuple[TensorEntry, ...]


class CudaIpcSource(msgspec.Struct, frozen=True, tag="cuda_ipc"):
    """GPU memory of a process on the host of all ranks.

    Attributes:
        handles: 64 bytes each, in hexadecimal: `cudaIpcMemHandle_t` of whole allocations.
        tensors: the tensors. `offset` counts from the base of the allocation.
    """

    handles: tuple[str, ...]
    tensors: tuple[TensorEntry, ...]


class GroupSource(msgspec.Struct, frozen=True, tag="group"):
    """Tensors that a trainer broadcasts over a process group which the ranks have joined.

    Attributes:
        group: the group's name; see `JoinGroup`.
        tensors: the tensors, in the order of the broadcasts.
        src: rank of the trainer in the group.
    """

    group: str
    tensors: tuple[TensorEntry, ...]
    src: int = 0


class LocalSource(msgspec.Struct, frozen=True, tag="local"):
    """Tensors in the process of an engine with one rank, which `LLM.update_weights` has left.

    Attributes:
        number: their number there.
    """

    number: int


Source = FolderSource | SharedMemorySource | CudaIpcSource | GroupSource | LocalSource


class JoinGroup(msgspec.Struct, frozen=True):
    """Makes every rank join a process group of a trainer.

    Attributes:
        address: host of the group's store.
        port: port of the store, which the trainer opens.
        rank_offset: rank of the engine's first rank in the group.
        world_size: number of members, with the trainer.
        group: name of the group.
        backend: "gloo" or "nccl".
        timeout: seconds for joining, and for each broadcast.
    """

    address: str
    port: int
    rank_offset: int
    world_size: int
    group: str = "weight_update_group"
    backend: str = "gloo"
    timeout: float = 300.0
