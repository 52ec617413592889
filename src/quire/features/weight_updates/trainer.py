"""The trainer's side of an update: memory that an engine can map, and a group that it joins.

It needs PyTorch and the modules of Quire that it imports, but no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from multiprocessing.shared_memory import SharedMemory
from typing import Any

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


def merged_weights(model: Any, adapter: str = "default") -> Iterator[tuple[str, Tensor]]:
    """Yields the weights that a LoRA adapter changes, with the adapter merged into them.

    The names are the checkpoint's, and the model itself does not change. Weights that no adapter
    layer covers are left out, because an update may lack them.

    Args:
        model: a `PeftModel` whose adapters are not merged.
        adapter: name of the adapter in the model.

    Raises:
        ValueError: adapters are merged already, no layer has this one, or it changes more than a
            product of two matrices can.
    """
    found = False
    for name, module in model.named_modules():
        whole = getattr(module, "modules_to_save", None)
        if isinstance(whole, torch.nn.ModuleDict) and adapter in whole:
            raise ValueError(f"{name} is trained as a whole (modules_to_save), not by the adapter")
        if not hasattr(module, "get_delta_weight") or not _has_adapter(module, adapter):
            continue
        _check_mergeable(name, module, adapter)
        found = True
        weight = module.base_layer.weight.detach()
        delta = module.get_delta_weight(adapter).detach()
        yield f"{name.removeprefix('base_model.model.')}.weight", weight + delta.to(weight.dtype)
    if not found:
        raise ValueError(f"no layer of the model has an adapter {adapter!r}")


def _has_adapter(module: Any, adapter: str) -> bool:
    return adapter in module.lora_A or adapter in module.lora_embedding_A


def _check_mergeable(name: str, module: Any, adapter: str) -> None:
    """Raises ValueError if a layer's weight plus the adapter's product is not the merged weight."""
    if module.merged:
        raise ValueError(f"{name} has a merged adapter; call unmerge_adapter() first")
    if module.use_dora.get(adapter):
        raise ValueError(f"{name} is trained with use_dora, which merged_weights cannot merge")
    if getattr(module, "lora_bias", {}).get(adapter):  # PEFT has it since 0.14.
        raise ValueError(f"{name} is trained with lora_bias, which merged_weights cannot merge")
    weight = module.base_layer.weight
    if not weight.is_floating_point():
        raise ValueError(f"{name} has a quantized weight ({weight.dtype}), which cannot be merged")
