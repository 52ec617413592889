"""A step on its way through the runner."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.arrays import Int32
from quire.layers.batch import ForwardBatch
from quire.plan import Logprobs, RowFlag, StepPlan


@dataclass(slots=True)
class LogitRows:
    """Where a step's logits come from, all int32 [M] on the host: the token's place in the batch
    (its hidden state), the plan's row, and the place of each row's last logits."""

    token: Int32
    row: Int32
    last: Int32

    @classmethod
    def of(cls, plan: StepPlan) -> LogitRows:
        ends = np.cumsum(plan.q_len)
        row = np.repeat(np.arange(plan.num_rows, dtype=np.int32), plan.n_logits)
        closes = np.cumsum(plan.n_logits)
        back = (closes[row] - np.arange(len(row))).astype(np.int32)
        token = (ends[row] - back).astype(np.int32)
        return cls(token=token, row=row, last=(closes - 1).astype(np.int32))


@dataclass
class Step:
    """One plan in flight.

    batch: what the model sees. first: int32 [R] on the host, each row's first position; exact for
    PROMPT rows. lanes: int64 [R], and position: int32 [R], each lane's position after the step; not
    needed, and absent, where a graph runs the head.
    hidden: [T, width] once the body has run. results: int32 [2, >= R], tokens and stop reasons,
    filled by the head.
    replayed: graphs run its head. waits: its head, still to be run, waits for masks.
    """

    plan: StepPlan
    batch: ForwardBatch
    first: Int32
    lanes: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    position: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    hidden: Tensor | None = None
    results: Tensor = field(default_factory=lambda: torch.empty(2, 0, dtype=torch.int32))
    logprobs: list[DeviceLogprobs] = field(default_factory=list)
    prompt_logprobs: list[DeviceLogprobs] = field(default_factory=list)
    pooled: DevicePooled | None = None
    replayed: bool = False
    waits: bool = False
    done: Any = None
    started: Any = None

    @functools.cached_property
    def logit_rows(self) -> LogitRows:
        """Needed, and made, where the head runs op by op."""
        return LogitRows.of(self.plan)

    @property
    def tokens(self) -> Tensor:
        """int32 [R]."""
        return self.results[0, : self.plan.num_rows]

    @property
    def stop_reason(self) -> Tensor:
        """int32 [R]."""
        return self.results[1, : self.plan.num_rows]

    @property
    def sampled_rows(self) -> Int32:
        """int32 [s]."""
        return np.flatnonzero(self.plan.flags & RowFlag.SAMPLE).astype(np.int32)


@dataclass(slots=True)
class DevicePooled:
    """A step's `Pooled`, still on the device. rows: int32 [m]. values: float32 [m, width]."""

    rows: Int32
    values: Tensor


@dataclass(slots=True)
class DeviceLogprobs:
    """A part of a step's `Logprobs`, still on the device except for what the host knew all along.

    rows: int32 [m]. wanted: int32 [m], how many alternatives each asked for.
    """

    rows: Int32
    wanted: Int32
    positions: Tensor
    ids: Tensor
    values: Tensor
    ranks: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return self.positions, self.ids, self.values, self.ranks


def join(parts: list[DeviceLogprobs]) -> Logprobs | None:
    """The parts, which lie on the host by now, as one, in row order; alternatives that a row did
    not ask for become -1."""
    if not parts:
        return None
    width = max(part.ids.shape[1] for part in parts)
    rows = np.concatenate([part.rows for part in parts])
    order = np.argsort(rows, kind="stable")
    wanted = np.concatenate([part.wanted for part in parts])[order]
    ids = np.concatenate([_wide(part.ids, width, -1) for part in parts])[order]
    values = np.concatenate([_wide(part.values, width, 0.0) for part in parts])[order]
    ids[np.arange(width) > wanted[:, None]] = -1
    return Logprobs(
        rows=rows[order],
        positions=np.concatenate([part.positions.numpy() for part in parts])[order],
        ids=ids,
        values=values,
        ranks=np.concatenate([part.ranks.numpy() for part in parts])[order],
    )


def _wide(x: Tensor, width: int, fill: float) -> Any:
    return torch.nn.functional.pad(x, (0, width - x.shape[1]), value=fill).numpy()


def row_mask_lines(plan: StepPlan) -> Int32:
    """Returns the line of `HeadInputs.mask` that each row samples by, -1 where there is none."""
    last = plan.mask_lines[np.cumsum(plan.n_logits) - 1]
    return np.where((plan.flags & RowFlag.GATED) != 0, last, np.int32(-1))
