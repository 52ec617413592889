"""Runs a vision tower beside the steps, one image at a time, in parts of a few layers.

On a GPU the encoder has a stream of its own. A part runs there while the step decodes, and no step
waits for it, unless the step reads the image. Parts are CUDA graphs by patch bucket; larger images
run op by op.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire import ops
from quire.features.images.encoder_clock import EncoderClock
from quire.features.images.encoder_steps import (
    PART,
    EncodeEntry,
    layer_ranges,
    patch_bucket,
    patch_buckets,
)
from quire.features.images.padded_run import fill, padded_run
from quire.features.images.preparation import prepare
from quire.features.images.processor import ImageGrid, Pixels, ProcessorSettings
from quire.features.images.shared_pixels import read_pixels
from quire.models.vision.grids import tower_inputs
from quire.models.vision.tower import TowerRun, VisionTower
from quire.ops.choose import current_policy

_MOST_CAPTURED = 8192
"""Most patches of an image whose parts are captured: an image of 1448 x 1448 with patches of 16."""


class ImageEncoder:
    """Encodes images into the table of embeddings.

    Args:
        settings: of the checkpoint's image processor.
        table: [rows, width], where embeddings go.
        serial: whether steps wait for every part, because streams that run at once would share the
            memory of deterministic kernels.
    """

    def __init__(
        self, tower: VisionTower, settings: ProcessorSettings, table: Tensor, *, serial: bool
    ) -> None:
        self._tower = tower
        self._settings = settings
        self._table = table
        self._device = table.device
        self._serial = serial
        self.clock = EncoderClock(self._device)
        on_gpu = self._device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._written: Any = None
        """The event after the last image, if no step has waited for it."""
        self._run: TowerRun
        """The image between two of its parts."""
        self._captured: dict[int, CapturedRun] = {}

    def encode(self, entry: EncodeEntry) -> None:
        """Launches layers of an image, behind all steps that are launched already."""
        grid = ImageGrid(entry.frames, entry.h, entry.w, entry.tokens, entry.merge)
        captured = self._captured.get(patch_bucket(grid.patches))
        with self._beside_steps(), self.clock:
            if entry.first == 0:
                self._open(entry, grid, captured)
            if captured is None:
                self._tower.run_layers(self._run, entry.first, entry.end)
            else:
                captured.replay(entry.first, entry.end)
            if entry.end == self._tower.depth:
                rows = slice(entry.row, entry.row + entry.tokens)
                self._table[rows] = self._run.outputs[: entry.tokens]
                if self._stream is not None:
                    self._written = self._stream.record_event()
        if self._serial:
            self.wait()

    def wait(self) -> None:
        """Makes the steps launched from here on wait until all images are in the table."""
        if self._written is not None:
            torch.cuda.current_stream(self._device).wait_event(self._written)
            self._written = None

    @contextlib.contextmanager
    def _beside_steps(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        # Earlier steps may still read the rows of the table that the image gets.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # The kernels for few rows share counters with those of the steps.
        policy = current_policy()
        policy = replace(policy, disabled=policy.disabled | {"skinny"})
        with torch.cuda.stream(self._stream), ops.use_policy(policy):
            yield

    def _open(self, entry: EncodeEntry, grid: ImageGrid, captured: CapturedRun | None) -> None:
        """Prepares an image."""
        pixels = read_pixels((entry.process, entry.descriptor), (entry.width, entry.height))
        patches = prepare(_upload(pixels, self._device), grid, self._settings)
        if captured is None:
            self._run = self._tower.open(patches, [grid])
        else:
            fill(captured.run, patches, tower_inputs(self._tower.spec, [grid], self._device))
            self._run = captured.run

    # -- graphs --------------------------------------------------------------------------------

    @property
    def capturable(self) -> bool:
        """Whether parts can be captured.

        Attention in 32 bits reads the segments on the host, and buckets must be whole squares.
        """
        spec = self._tower.spec
        flash = self._tower.dtype.itemsize == 2 and spec.head_dim % 8 == 0
        modern = torch.cuda.get_device_capability(self._device) >= (8, 0)
        return flash and modern and patch_bucket(1) % spec.merge**2 == 0

    def capture(self) -> float:
        """Captures the parts of images, and compiles all kernels.

        Returns the seconds that a part of `PART` patches takes.
        """
        tower, settings = self._tower, self._settings
        most = min(_MOST_CAPTURED, settings.max_pixels // settings.patch**2)
        pool = torch.cuda.graph_pool_handle()
        # The largest run comes first. Others use a part of its states.
        states: TowerRun | None = None
        with self._beside_steps():
            self._prepare_one()
            for count in reversed(patch_buckets(patch_bucket(most))):
                run = padded_run(tower, count, states)
                states = states or run
                self._captured[count] = CapturedRun(tower, run, pool)
            return self._captured[max(size for size in self._captured if size <= PART)].seconds()

    def _prepare_one(self) -> None:
        """Compiles the kernels that prepare images."""
        side, merge = self._settings.factor, self._settings.merge
        pixels = torch.zeros(side + 1, side + 1, 3, dtype=torch.uint8, device=self._device)
        prepare(pixels, ImageGrid(1, merge, merge, 1, merge), self._settings)


class CapturedRun:
    """The graphs of all images of a patch bucket.

    Args:
        run: the states that the graphs read and write.
        pool: memory that all graphs of the encoder share, because they never run at once.
    """

    def __init__(self, tower: VisionTower, run: TowerRun, pool: Any) -> None:
        self.run = run
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        """By the first layer of each part."""
        ranges = layer_ranges(tower.depth, len(run.patches))
        # Nothing may be compiled or looked up for the first time within a capture.
        tower.run_layers(run, 0, tower.depth)
        for first, end in ranges:
            graph = self._graphs[first] = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                tower.run_layers(run, first, end)
            finally:
                graph.capture_end()

    def replay(self, first: int, end: int) -> None:
        for start, graph in self._graphs.items():
            if first <= start < end:
                graph.replay()

    def seconds(self) -> float:
        """Measures the mean time of a part."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for event in (begin, end):
            # The first turn is not timed, because it also uploads the graphs.
            for graph in self._graphs.values():
                graph.replay()
            event.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / len(self._graphs)


def _upload(pixels: Pixels, device: torch.device) -> Tensor:
    """Returns pixels on the device. The host does not wait for the copy."""
    if device.type != "cuda":
        return torch.tensor(pixels)
    pinned = torch.empty(pixels.shape, dtype=torch.uint8, pin_memory=True)
    pinned.numpy()[...] = pixels
    return pinned.to(device, non_blocking=True)
