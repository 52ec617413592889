"""The runner's part of images: encodes them, and brings their embeddings into bodies."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.config import EngineConfig
from quire.executor import StepSeconds, WorkerCall
from quire.features.images.args import ImageArgs
from quire.features.images.encoder_steps import COLUMN, ENCODE, TABLE, EncodeEntry, TableFacts
from quire.features.images.preparation import prepare
from quire.features.images.processor import ImageGrid, ImageProcessor
from quire.features.images.shared_pixels import read_pixels
from quire.layers.batch import ForwardBatch, GivenRows
from quire.models import Decoder, load_config
from quire.models.vision.tower import load_tower
from quire.ops.images import SPAN, span_rows
from quire.ops.rows import StepRows
from quire.plan import KVGroup, StepPlan
from quire.runner.hooks import HostHook, ProgramHook
from quire.runner.readback import Step, Upload
from quire.runner.state import BatchState, ColumnSpec, Limits

_WARM_UP = (64, 640)
"""Sides of the images that are encoded at the start."""


class ImageHook(ProgramHook, HostHook):
    """Holds the tower and the table of embeddings. Steps without images run bodies without them."""

    alters = True
    entries = frozenset({ENCODE})

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._settings = ImageArgs.of(config.args)
        self._has_images = np.zeros(config.scheduler.max_num_seqs, dtype=bool)
        self._clock: _EncoderClock

    def attach(self, model: Decoder) -> None:
        path, args = Path(self._config.model_path), self._config.args
        found = load_config(path)
        self._device = model.device
        self._tower = load_tower(
            path,
            found,
            device=model.device,
            dtype=model.dtype,
            load_format=args.load_format,
            seed=args.seed,
        )
        self._processor = ImageProcessor.from_folder(path, found)
        self._clock = _EncoderClock(model.device)
        tower = self._tower
        row_bytes = tower.width * tower.dtype.itemsize
        rows = int(self._settings.image_cache_gb * 1e9) // row_bytes
        # `zeros`, because padding reads the first row.
        self._table = torch.zeros(rows, tower.width, dtype=tower.dtype, device=model.device)
        self._facts = TableFacts(rows, row_bytes, self._clock.seconds)

    def columns(self, limits: Limits) -> Sequence[ColumnSpec]:
        return (ColumnSpec(COLUMN, (self._settings.max_images, SPAN)),)

    def bind(self, state: BatchState) -> None:
        self._spans = state.columns[COLUMN]

    def reserved_bytes(self, groups: Sequence[KVGroup], budget: int) -> int:
        processor = self._processor.settings
        largest = processor.max_pixels // processor.patch**2
        step = self._settings.image_step_tokens * processor.merge**2
        return self._tower.workspace_bytes(max(largest, step))

    @torch.inference_mode()
    def seconds(self, program: Any, graphs: Any) -> StepSeconds:
        """Compiles the kernels, so that the first image does not wait for it."""
        for side in _WARM_UP if self._device.type == "cuda" else ():
            grid = self._processor.size(side, side)
            pixels = torch.zeros(side, side, 3, dtype=torch.uint8, device=self._device)
            self._tower.encode([prepare(pixels, grid, self._processor.settings)], [grid])
        return {}

    def calls(self) -> Mapping[WorkerCall[Any, Any], Callable[[Any], Any]]:
        return {TABLE: lambda _: self._facts}

    # -- a step --------------------------------------------------------------------------------

    def stage(self, plan: StepPlan, upload: Upload) -> None:
        if COLUMN in plan.writes:
            lanes, spans = plan.writes[COLUMN]
            self._has_images[lanes] = spans[:, 0, 1] > 0

    def begin(self, step: Step) -> None:
        if ENCODE not in step.plan.writes:
            return
        rows, words = step.plan.writes[ENCODE]
        entries = [
            EncodeEntry(row, *line) for row, line in zip(rows.tolist(), words.tolist(), strict=True)
        ]
        with self._clock:
            grids = [ImageGrid(each.t, each.h, each.w, each.tokens, each.merge) for each in entries]
            patches = [
                self._patches(entry, grid) for entry, grid in zip(entries, grids, strict=True)
            ]
            outputs = self._tower.encode(patches, grids)
            for entry, output in zip(entries, outputs, strict=True):
                self._table[entry.row : entry.row + entry.tokens] = output

    def _patches(self, entry: EncodeEntry, grid: ImageGrid) -> torch.Tensor:
        pixels = read_pixels((entry.process, entry.descriptor), (entry.width, entry.height))
        copied = torch.tensor(pixels, device=self._device)
        return prepare(copied, grid, self._processor.settings)

    def altered(self, plan: StepPlan) -> bool:
        return bool(self._has_images[plan.lanes].any())

    def batch(self, rows: StepRows, batch: ForwardBatch, altered: bool) -> None:
        if altered:
            index, batch.rotary = span_rows(rows, batch.positions, self._spans)
            batch.given = GivenRows(index, self._table, 1 + self._tower.levels)


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


class _EncoderClock:
    """Measures the device's time for what runs within it."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._total = 0.0
        self._began = 0.0
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def __enter__(self) -> None:
        if self._on_device:
            began, ended = (_event() for _ in range(2))
            began.record()
            self._events.append((began, ended))
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._on_device:
            self._events[-1][1].record()
        else:
            self._total += time.perf_counter() - self._began

    def seconds(self) -> float:
        """Returns the time of all work that has ended."""
        while self._events and self._events[0][1].query():  # type: ignore[no-untyped-call]
            began, ended = self._events.popleft()
            self._total += began.elapsed_time(ended) / 1e3
        return self._total
