"""The runner's side: it makes vectors of hidden states."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.features.pooling.dense import load_dense
from quire.features.pooling.encoder_hook import EncoderPooler, row_shares
from quire.features.pooling.feature import COLUMN, Share
from quire.features.pooling.sentence_files import read_sentence_files
from quire.models import Decoder
from quire.ops import op
from quire.ops.reference.pool import pool_rows
from quire.plan import Pooled, StepPlan, StopReason
from quire.runner.hooks import HostHook
from quire.runner.readback import Step, Upload
from quire.runner.state import BatchState

_pool_rows = op(pool_rows)


class Pooler(HostHook):
    """Adds up states over a prompt's chunks in float32, and ends rows whose vector is complete.

    Every rank has the whole hidden states, so every rank computes the whole vectors.
    """

    entries = frozenset({COLUMN})

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    def attach(self, model: Decoder) -> None:
        args = self._config.args
        files = read_sentence_files(Path(self._config.model_path))
        self._dense = load_dense(
            files.dense, model.device, dummy=args.load_format == "dummy", seed=args.seed
        )

    def bind(self, state: BatchState) -> None:
        self._state = state
        self._sums: Tensor | None = None
        self._uploaded: tuple[Upload, int] | None = None

    def stage(self, plan: StepPlan, upload: Upload) -> None:
        self._uploaded = None
        if COLUMN in plan.writes:
            self._uploaded = upload, upload.add(row_shares(plan))

    def hidden(self, step: Step, hidden: Tensor) -> None:
        if self._uploaded is None:
            return
        upload, key = self._uploaded
        state, width = self._state, hidden.shape[1]
        if self._sums is None:
            self._sums = torch.zeros(state.limits.lanes, width, device=state.device)
        rows = state.rows.first(step.plan.num_rows)
        lengths = state.position[rows.lanes.long()]
        vectors = torch.zeros(len(rows.lanes), width, device=state.device)
        _pool_rows(hidden, rows, upload[key], self._sums, lengths, vectors)
        for dense in self._dense:
            vectors = dense(vectors)
        step.send(COLUMN, vectors)

    def read(self, step: Step) -> None:
        vectors = step.arrived(COLUMN)
        if vectors is None:
            return
        ends = np.flatnonzero(row_shares(step.plan) & Share.ENDS).astype(np.int32)
        step.result.stop_reason[ends] = StopReason.LENGTH
        if len(ends):
            step.result.pooled = Pooled(ends, vectors.numpy()[ends])


def open_pooler(config: EngineConfig) -> Pooler | EncoderPooler:
    """Returns the hook for a worker."""
    return EncoderPooler(config) if config.encoder else Pooler(config)
