"""The trainer's side of an update: memory that an engine can map, and a group that it joins.

It needs PyTorch and the modules of Quire that it imports, but no engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from multiprocessing.shared_memory import SharedMemory

import torch
from torch import Tensor

from quire.features.weight_updates.payloads import CudaIpcSource, SharedMemorySource, TensorEntry
from quire.models.files import DTYPES
from quire.runner.transfer.ipc_agent import CudaIpc

_ALIGN = 64
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class SharedWeights:
    """Copies of tensors in a shared memory segment. Its owner closes it after the update.

    Args:
        tensors: the tensors with their names in the checkpoint.

    Attributes:
        source: describes the segment to an engine.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        given, infos, end = list(tensors), [], 0
        for name, tensor in given:
            infos.append(describe(name, tensor, end))
            end += -(-tensor.nbytes // _ALIGN) * _ALIGN
        self._memory = SharedMemory(create=True, size=max(1, end))
        for (_, tensor), info in zip(given, infos, strict=True):
            if tensor.nbytes:
                target = torch.frombuffer(
                    self._memory.buf, dtype=torch.uint8, count=tensor.nbytes, offset=info.offset
                )
                target.copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
                del target
        self.source = SharedMemorySource(self._memory.name, tuple(infos))

    def close(self) -> None:
        self._memory.close()
        self._memory.unlink()


def describe(name: str, tensor: Tensor, offset: int = 0, memory: int = 0) -> TensorEntry:
    """Returns the description of a tensor."""
    return TensorEntry(name, _NAMES[tensor.dtype], tuple(tensor.shape), offset, memory)


def cuda_ipc_source(tensors: Iterable[tuple[str, Tensor]]) -> CudaIpcSource:
    """Returns the description of contiguous tensors on one GPU, which an engine can map.

    The tensors must live until the update has ended. PyTorch must have allocated them by
    `cudaMalloc` (not with `expandable_segments`).
    """
    handles: dict[int, str] = {}
    infos: list[TensorEntry] = []
    driver: CudaIpc | None = None
    for name, tensor in tensors:
        driver = driver or CudaIpc(tensor.device.index or 0)
        base, _ = driver.allocation(tensor.data_ptr())
        if base not in handles:
            handles[base] = driver.export(base).hex()
        place = list(handles).index(base)
        infos.append(describe(name, tensor.detach(), tensor.data_ptr() - base, place))
    torch.cuda.synchronize()
    return CudaIpcSource(tuple(handles.values()), tuple(infos))
