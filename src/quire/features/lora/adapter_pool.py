"""One rank's adapters: in the device's slots, and in a cache in host memory."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.errors import ConfigError, RequestError
from quire.features.lora.adapted_linear import AdaptedLinear, AdaptedStep, adapter_rows
from quire.features.lora.peft import read_adapter
from quire.features.lora.projections import Adapter, AdapterLayout, Image
from quire.models import Decoder
from quire.ops.adapters import SlotWeights
from quire.ops.rows import StepRows

_log = logging.getLogger(__name__)

Flags = np.ndarray[tuple[int], np.dtype[np.int64]]


class ImageCache:
    """An LRU cache of adapters in host memory, by digest. Thread-safe.

    Args:
        capacity: limit in bytes. The latest adapter stays even if it alone is larger.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._images: OrderedDict[str, Image] = OrderedDict()
        self._lock = threading.Lock()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._images)

    def get(self, digest: str) -> Image | None:
        with self._lock:
            image = self._images.get(digest)
            if image is not None:
                self._images.move_to_end(digest)
            return image

    def put(self, digest: str, image: Image) -> None:
        with self._lock:
            if digest in self._images:
                return
            self._images[digest] = image
            self.nbytes += image.nbytes
            while self.nbytes > self._capacity and len(self._images) > 1:
                self.nbytes -= self._images.popitem(last=False)[1].nbytes


class AdapterPool:
    """The slots of a model's device, and the thread that fills them.

    Reading and copying overlap with running steps. A slot is written only while no request uses it.

    Args:
        slots: number of slots.
        rank: largest rank of an adapter.
        cache_bytes: bytes of the cache in host memory.
        flags: int64 [ranks], number of the last load that each rank has done; negative if the load
            failed.

    Raises:
        ConfigError: the model has no layers for adapters, or the slots do not fit.
    """

    def __init__(
        self, model: Decoder, *, slots: int, rank: int, cache_bytes: int, flags: Flags
    ) -> None:
        self.slots = slots
        self.layout = layout = AdapterLayout(model, rank)
        self.cache = ImageCache(cache_bytes)
        self._device, self._rank, self._flags = model.device, model.group.rank, flags
        if layout.elements >= 2**31:
            raise ConfigError(
                f"an adapter of rank {layout.rank} may have {layout.elements} weights on a rank, "
                "more than 2**31 - 1; lower max_lora_rank",
                "max_lora_rank",
            )
        try:
            self._memory = torch.zeros(
                self.slots, layout.elements, dtype=model.dtype, device=model.device
            )
        except RuntimeError:
            size = self.slots * layout.elements * model.dtype.itemsize
            raise ConfigError(
                f"there is no room for max_loras={self.slots} adapters of rank {layout.rank}, "
                f"which take {size / 1e9:.1f} GB; lower max_loras or max_lora_rank",
                "max_loras",
            ) from None
        shape = self.slots, len(layout.layers), layout.words
        self._tables = torch.zeros(shape, dtype=torch.int32, device=model.device)
        self._step = AdaptedStep()
        for index, layer in enumerate(layout.layers):
            low, high = layer.columns
            weights = SlotWeights(
                self._memory, self._tables[:, index], tuple(layer.sizes), high - low, layout.rank
            )
            layer.adapter = AdaptedLinear(layer, weights, self._step)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._stream: Any = None
        if model.device.type == "cuda":
            self._stream = torch.cuda.Stream(model.device)  # type: ignore[no-untyped-call]

    # -- steps ---------------------------------------------------------------------------------

    def begin(self, rows: StepRows, column: Tensor, tokens: int) -> None:
        """Prepares the layers for a step with adapters. column: slots by lane, int32 [lanes]."""
        self._step.rows = adapter_rows(rows, column, num_tokens=tokens, num_slots=self.slots)

    def end(self) -> None:
        """Prepares the layers for a step without adapters."""
        self._step.rows = None

    # -- adapters ------------------------------------------------------------------------------

    def read(self, path: str) -> Future[str]:
        """Reads an adapter into host memory, on another thread. Returns its digest. Raises
        RequestError."""
        return self._thread.submit(self.read_now, path)

    def read_now(self, path: str) -> str:
        """Does what `read` does, on this thread."""
        return self._read(path)[0]

    def load(self, number: int, slot: int, path: str, digest: str) -> None:
        """Copies an adapter to a slot on another thread, and then sets this rank's flag.

        Args:
            number: number of the load, counted from 1.
            slot: a slot that no request uses.
        """
        before = None
        if self._stream is not None:
            # Launched steps may still read the slot's earlier content.
            before = torch.cuda.current_stream(self._device).record_event()
        self._thread.submit(self._load, number, slot, path, digest, before)

    def done(self, number: int) -> bool | None:
        """Returns whether a load is done on all ranks; None: one has failed."""
        if (self._flags == -number).any():
            return None
        return bool((self._flags == number).all())

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _read(self, path: str) -> tuple[str, Image]:
        adapter: Adapter = read_adapter(Path(path), self.layout)
        image = self.cache.get(adapter.digest)
        if image is None:
            image = self.layout.image(adapter, pinned=self._stream is not None)
            self.cache.put(adapter.digest, image)
        return adapter.digest, image

    @torch.inference_mode()
    def _load(self, number: int, slot: int, path: str, digest: str, before: Any) -> None:
        try:
            image = self.cache.get(digest)
            if image is None:
                found, image = self._read(path)
                if found != digest:
                    raise RequestError("the adapter's files have changed", "model")
            self._copy(image, slot, before)
        except Exception as error:  # All ranks wait for the flag, so every error must set it.
            _log.warning("adapter %s could not be copied to a slot: %r", path, error)
            self._flags[self._rank] = -number
        else:
            self._flags[self._rank] = number

    def _copy(self, image: Image, slot: int, before: Any) -> None:
        if self._stream is None:
            self.put(image, slot)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(before)
            self.put(image, slot)
            self._stream.synchronize()

    def put(self, image: Image, slot: int) -> None:
        """Starts copying an adapter to a slot, on the current stream."""
        self._memory[slot, : len(image.data)].copy_(image.data, non_blocking=True)
        self._tables[slot].copy_(image.table, non_blocking=True)
