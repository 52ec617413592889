"""The programs of a step on the device: the same for a CPU, op by op on a GPU, and captured.

A body computes the step's tokens and stores their KV; a head turns the hidden states of the logit
rows into tokens, and moves the lanes on. Neither makes a decision on the host: all they need to
know beyond their shape is in `BatchState`, and all that they leave is there, or in the program's
own buffers, so that graphs of both may share their memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from quire import ops
from quire.layers.batch import ForwardBatch, GroupBatch
from quire.models import Decoder
from quire.ops import Drafts, LogitRows, StepRows
from quire.runner.hooks.hook import HeadContext, Hook, Level
from quire.runner.state import BatchState


@dataclass(frozen=True, slots=True)
class BodyShape:
    """Places for tokens and rows, the most tokens of a row, and whether a hook changes what the
    model computes."""

    tokens: int
    rows: int
    longest: int
    altered: bool = False


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Places for logit rows, and what the head can do."""

    logit_rows: int
    level: Level


class CapturedPrograms(Protocol):
    """Programs that can be replayed, by shape."""

    def body(self, step: BodyShape) -> BodyShape | None:
        """Returns the shape of the captured body that a step is padded to; None: none holds it."""
        ...

    def head(self, logit_rows: int, level: Level) -> HeadShape | None:
        """Returns the shape of the captured head for a step; None: none holds it."""
        ...

    def replay(self, key: Any) -> None:
        """Launches a captured program."""
        ...


@dataclass(frozen=True, slots=True)
class ModelLanes:
    """A model over the lanes of a state; a second model may run over the same lanes.

    layers: its KV, by layer. groups: which of the state's KV groups are the model's.
    position: int32 [lanes], where the model stands in each lane. ahead: how far behind a position
    the token stands that it is fed there.
    """

    model: Any
    state: BatchState
    layers: Sequence[Any]
    groups: range
    position: Tensor
    ahead: int = 0

    def forward(
        self,
        rows: StepRows,
        logit_rows: LogitRows,
        shape: BodyShape,
        *,
        drafts: Drafts | None = None,
        **inputs: Any,
    ) -> Tensor:
        """Computes the rows' tokens, and fills in `logit_rows`. Returns hidden states [T, width].

        drafts: after `place_drafts`, where rows may have some. inputs: what else the model takes.
        """
        state = self.state
        groups = [(state.groups[i], state.tables[i]) for i in self.groups]
        states = [table for group, table in groups if group.kind == "state"]
        expanded = ops.expand_rows(
            rows,
            self.position,
            state.tokens[:, self.ahead :],
            [(table, group.tokens_per_block) for group, table in groups if group.kind != "state"],
            logit_rows,
            num_tokens=shape.tokens,
            max_seq_len=state.limits.length,
            drafts=drafts,
        )
        batch = ForwardBatch(
            input_ids=expanded.ids,
            positions=expanded.positions,
            query_start=rows.query_start,
            seq_lens=expanded.seq_lens,
            groups=(
                *(GroupBatch(*group) for group in expanded.groups),
                *(GroupBatch(rows.lanes, table, {"flags": rows.flags}) for table in states),
            ),
            q_lens=expanded.q_lens,
            max_q_len=shape.longest,
            max_seq_len=expanded.max_seq_len,
        )
        hidden: Tensor = self.model(batch, self.layers, **inputs)
        return hidden


class StepProgram:
    """The programs of the model that gives the tokens.

    hooks: in the order in which they take part. drafts: the claims that bodies verify, or None.
    hidden: [tokens, width], the final states of the body just run.
    last: [logit rows, width], those of its logit rows.
    """

    def __init__(
        self, lanes: ModelLanes, hooks: Sequence[Hook], drafts: Drafts | None = None
    ) -> None:
        self.model: Decoder = lanes.model
        self._state = state = lanes.state
        self.lanes = lanes
        self.hooks = tuple(hooks)
        self._drafts = drafts
        limits, width = state.limits, self.model.spec.hidden_size
        options = {"dtype": self.model.dtype, "device": state.device}
        self.hidden = torch.zeros(limits.tokens, width, **options)
        self.last = torch.zeros(limits.logit_rows, width, **options)

    def body(self, shape: BodyShape, *, shallow: bool = False) -> None:
        """Computes the step's tokens. shallow: only the first layers, up to one of each kind."""
        state, position = self._state, self.lanes.position
        rows = state.rows.first(shape.rows)
        drafts = self._drafts if shape.longest > 1 else None
        if drafts is not None:
            ops.place_drafts(rows, position, state.tokens, drafts)
        logit_rows = state.logit_rows  # all: heads are padded further than bodies
        for hook in self.hooks:
            hook.body(rows, shape.tokens, shape.altered)
        hidden = self.lanes.forward(rows, logit_rows, shape, drafts=drafts, shallow=shallow)
        ops.collect_rows(hidden, rows, logit_rows, position, self.last, self.hidden)

    def head(self, shape: HeadShape) -> None:
        """Draws tokens for the logit rows, and moves the lanes of all rows on."""
        state = self._state
        raw = self.model.logits(self.last[: shape.logit_rows])
        ctx = HeadContext(
            level=shape.level,
            state=state,
            rows=state.rows,
            logit_rows=state.logit_rows.first(shape.logit_rows),
            raw=raw,
            logits=raw,
        )
        for hook in self.hooks:
            hook.logits(ctx)
        for hook in self.hooks:
            hook.tokens(ctx)
