"""NVML, the driver's library, and the GPUs of it that CUDA sees."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any


def open_nvml() -> Any:
    """Returns NVML, or None where it does not work."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, or one that does not answer
        return None
    return pynvml


def visible_gpus(nvml: Any) -> Iterator[tuple[int, Any]]:
    """Yields (the driver's index, handle) of each GPU that CUDA sees, in CUDA's order where all
    GPUs are of one kind.

    Raises:
        nvml.NVMLError: the driver fails.
    """
    gpus = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        gpus.append((index, handle, text(nvml.nvmlDeviceGetUUID(handle))))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(index) for index, *_ in gpus] if visible is None else visible.split(",")
    for name in (name.strip() for name in names):
        for index, handle, uuid in gpus:
            # An index, or the beginning of a UUID.
            if name == str(index) or (name and uuid.startswith(name)):
                yield index, handle


def text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
