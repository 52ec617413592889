"""The runner's side of encoders: vectors, classes or token vectors of hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.arrays import Int32, int32
from quire.config import EngineConfig
from quire.features.pooling.dense import load_dense
from quire.features.pooling.feature import COLUMN, NO_SECOND_TEXT, TYPES_COLUMN, Share
from quire.features.pooling.sentence_files import read_sentence_files
from quire.layers.batch import ForwardBatch
from quire.models import Encoder
from quire.ops.rows import StepRows
from quire.plan import Pooled, StepPlan, StopReason
from quire.runner.hooks import HostHook, ProgramHook
from quire.runner.readback import Step, Upload
from quire.runner.state import BatchState, ColumnSpec, Limits


class EncoderPooler(ProgramHook, HostHook):
    """Pools rows that are whole texts, and ends their requests.

    Every rank has the whole hidden states, so every rank computes all results.
    """

    entries = frozenset({COLUMN})

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._second: Tensor | None = None
        self._head_share = Share(0)
        """Part of every row that the classification head needs."""
        self._staged: tuple[Upload, dict[str, int]] | None = None

    def attach(self, model: Any) -> None:
        assert isinstance(model, Encoder)
        self._model = model
        config, args = self._config, self._config.args
        files = read_sentence_files(Path(config.model_path))
        self._dense = load_dense(
            files.dense, model.device, dummy=args.load_format == "dummy", seed=args.seed
        )
        head = model.spec.classifier
        if head is not None:
            self._head_share = Share.FIRST if head.pooling == "cls" else Share.MEAN
        tasks: dict[str, Callable[..., Tensor]] = {
            "embed": self._vectors, "classify": self._classes, "tokens": self._token_vectors,
        }  # fmt: skip
        self._run = tasks[config.task]

    def columns(self, limits: Limits) -> Sequence[ColumnSpec]:
        pairs = self._config.task == "classify"
        return (ColumnSpec(TYPES_COLUMN, fill=NO_SECOND_TEXT),) if pairs else ()

    def bind(self, state: BatchState) -> None:
        if self._model.spec.token_types > 1:
            self._second = state.columns.get(TYPES_COLUMN)

    def batch(self, rows: StepRows, batch: ForwardBatch, altered: bool) -> None:
        if self._second is None:
            return
        tokens = torch.arange(
            len(batch.positions), dtype=torch.int32, device=batch.positions.device
        )
        row = torch.searchsorted(batch.query_start, tokens, right=True) - 1
        lane = rows.lanes[row.clamp(max=len(rows.lanes) - 1)].clamp(min=0)
        batch.token_types = (batch.positions >= self._second[lane.long()]).int()

    # -- a step --------------------------------------------------------------------------------

    def stage(self, plan: StepPlan, upload: Upload) -> None:
        self._staged = None
        if COLUMN not in plan.writes:
            return
        ends = np.cumsum(plan.q_len, dtype=np.int32)
        shares = row_shares(plan) | self._head_share
        kinds = {
            "first": np.flatnonzero(shares & Share.FIRST),
            "largest": np.flatnonzero(shares & Share.LARGEST),
            "mean": np.flatnonzero(shares & Share.MEAN),
        }
        keys = {name: upload.add(int32(rows)) for name, rows in kinds.items() if len(rows)}
        keys |= {"ends": upload.add(ends), "lengths": upload.add(int32(plan.q_len))}
        self._staged = upload, keys

    def hidden(self, step: Step, hidden: Tensor) -> None:
        if self._staged is None:
            return
        upload, keys = self._staged
        step.send(COLUMN, self._run(hidden, {name: upload[key] for name, key in keys.items()}))

    def _vectors(self, hidden: Tensor, rows: dict[str, Tensor]) -> Tensor:
        """Returns the vector of each row, float32 [R, width]."""
        vectors = self._pooled(hidden, rows)
        for dense in self._dense:
            vectors = dense(vectors)
        return vectors

    def _pooled(self, hidden: Tensor, rows: dict[str, Tensor]) -> Tensor:
        """Returns the pooled state of each row, float32 [R, hidden size]."""
        ends, lengths = rows["ends"].long(), rows["lengths"].long()
        vectors = hidden[ends - 1].float()
        if "first" in rows:
            own = rows["first"].long()
            vectors[own] = hidden[(ends - lengths)[own]].float()
        for name, reduce in (("mean", "mean"), ("largest", "max")):
            if name in rows:
                own = rows[name].long()
                reduced = torch.segment_reduce(hidden.float(), reduce, lengths=lengths, unsafe=True)
                vectors[own] = reduced[own]
        return vectors

    def _classes(self, hidden: Tensor, rows: dict[str, Tensor]) -> Tensor:
        """Returns the logits of each row's classes, float32 [R, classes]."""
        head = self._model.classifier
        assert head is not None
        states = self._pooled(hidden, rows).to(self._model.dtype)
        return head(states)  # type: ignore[no-any-return]

    def _token_vectors(self, hidden: Tensor, rows: dict[str, Tensor]) -> Tensor:
        """Returns the vectors of all tokens, of length 1, float32 [T, width]."""
        vectors = hidden
        if self._model.projection is not None:
            vectors = self._model.projection(vectors)
        for dense in self._dense:
            vectors = dense(vectors)
        return F.normalize(vectors.float(), dim=1)

    def read(self, step: Step) -> None:
        vectors = step.arrived(COLUMN)
        if vectors is None:
            return
        plan = step.plan
        rows = np.flatnonzero(row_shares(plan) & Share.ENDS).astype(np.int32)
        step.result.stop_reason[rows] = StopReason.LENGTH
        if self._config.task == "tokens":
            step.result.pooled = Pooled(rows, vectors.numpy(), int32(plan.q_len))
        elif len(rows):
            step.result.pooled = Pooled(rows, vectors.numpy()[rows])


def row_shares(plan: StepPlan) -> Int32:
    """Returns each row's `Share`, int32 [R]."""
    lanes, values = plan.writes[COLUMN]
    if len(lanes) == plan.num_rows and (lanes == plan.lanes).all():
        return values
    by_lane = dict(zip(lanes.tolist(), values.tolist(), strict=True))
    return int32([by_lane.get(lane, 0) for lane in plan.lanes.tolist()])
