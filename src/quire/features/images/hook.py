"""The runner's part of images: encodes them, and brings their embeddings into bodies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.config import EngineConfig
from quire.errors import ModelError
from quire.executor import StepSeconds, WorkerCall
from quire.features.images.args import ImageArgs
from quire.features.images.encoder_steps import COLUMN, ENCODE, TABLE, EncodeEntry, TableFacts
from quire.features.images.image_encoder import ImageEncoder
from quire.features.images.processor import ImageProcessor
from quire.features.images.videos import VideoSettings
from quire.layers.batch import ForwardBatch, GivenRows
from quire.models import Decoder, load_config
from quire.models.vision.tower import load_tower
from quire.ops.images import SPAN, span_rows
from quire.ops.rows import StepRows
from quire.plan import KVGroup, StepPlan
from quire.runner.hooks import HostHook, ProgramHook
from quire.runner.readback import Step, Upload
from quire.runner.state import BatchState, ColumnSpec, Limits


class ImageHook(ProgramHook, HostHook):
    """Holds the tower and the table of embeddings. Steps without images run bodies without them."""

    alters = True
    entries = frozenset({ENCODE})

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._settings = ImageArgs.of(config.args)
        self._has_images = np.zeros(config.scheduler.max_num_seqs, dtype=bool)
        self._parts_a_step = 1

    def attach(self, model: Decoder) -> None:
        path, args = Path(self._config.model_path), self._config.args
        found = load_config(path)
        self._tower = load_tower(
            path,
            found,
            device=model.device,
            dtype=model.dtype,
            load_format=args.load_format,
            seed=args.seed,
        )
        self._processor = ImageProcessor.from_folder(path, found)
        tower = self._tower
        rows = int(self._settings.image_cache_gb * 1e9) // (tower.width * tower.dtype.itemsize)
        # `zeros`, because padding reads the first row.
        self._table = torch.zeros(rows, tower.width, dtype=tower.dtype, device=model.device)
        self._encoder = ImageEncoder(
            tower, self._processor.settings, self._table, serial=args.deterministic
        )

    def columns(self, limits: Limits) -> Sequence[ColumnSpec]:
        return (ColumnSpec(COLUMN, (self._settings.max_images, SPAN)),)

    def bind(self, state: BatchState) -> None:
        self._spans = state.columns[COLUMN]

    def reserved_bytes(self, groups: Sequence[KVGroup], budget: int) -> int:
        processor = self._processor.settings
        largest = self._most_pixels() // processor.patch**2
        step = self._settings.image_step_tokens * processor.merge**2
        return self._tower.workspace_bytes(max(largest, step))

    def _most_pixels(self) -> int:
        """Returns the most pixels that the tower sees at once: an image, or a group of frames."""
        images = self._processor.settings
        try:
            videos = VideoSettings.from_folder(Path(self._config.model_path), images)
        except ModelError:
            return images.max_pixels  # The reader refuses videos then.
        return max(images.max_pixels, videos.pixels.max_pixels // images.temporal)

    @torch.inference_mode()
    def seconds(self, program: Any, graphs: Any) -> StepSeconds:
        """Captures the tower, so that the first image does not wait for it."""
        if graphs is not None and self._encoder.capturable:
            part = self._encoder.capture()
            self._parts_a_step = max(1, int(self._settings.image_step_ms / 1e3 / part))
        return {}

    def calls(self) -> Mapping[WorkerCall[Any, Any], Callable[[Any], Any]]:
        return {TABLE: self._facts}

    def _facts(self, request: None) -> TableFacts:
        rows, width = self._table.shape
        return TableFacts(
            rows=rows,
            row_bytes=width * self._table.itemsize,
            seconds=self._encoder.clock.seconds,
            layers=self._tower.depth,
            parts_a_step=self._parts_a_step,
        )

    # -- a step --------------------------------------------------------------------------------

    def stage(self, plan: StepPlan, upload: Upload) -> None:
        if COLUMN in plan.writes:
            lanes, spans = plan.writes[COLUMN]
            self._has_images[lanes] = spans[:, 0, 1] > 0

    def begin(self, step: Step) -> None:
        if ENCODE in step.plan.writes:
            rows, words = step.plan.writes[ENCODE]
            for row, line in zip(rows.tolist(), words.tolist(), strict=True):
                self._encoder.encode(EncodeEntry(row, *line))
        if self.altered(step.plan):
            self._encoder.wait()

    def altered(self, plan: StepPlan) -> bool:
        return bool(self._has_images[plan.lanes].any())

    def batch(self, rows: StepRows, batch: ForwardBatch, altered: bool) -> None:
        if altered:
            index, batch.rotary = span_rows(rows, batch.positions, self._spans)
            batch.given = GivenRows(index, self._table, 1 + self._tower.levels)
