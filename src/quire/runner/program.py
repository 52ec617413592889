"""The programs of a step on the device: the same on a CPU, op by op on a GPU, and in CUDA graphs.

A body computes the step's tokens and stores their KV. A head turns the hidden states of the logit
rows into tokens, and advances the lanes. Neither decides anything on the host. Both depend only on
their shape and on `BatchState`. They write only `BatchState` and the program's own buffers, so that
the graphs of both can share their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from quire import ops
from quire.layers.batch import ForwardBatch, GroupBatch
from quire.models import Decoder
from quire.ops import Drafts, Expanded, LogitRows, StepRows
from quire.runner.hooks.hook import HeadContext, Level, ProgramHook
from quire.runner.state import BatchState


@dataclass(frozen=True, slots=True)
class BodyShape:
    """The shape of a body.

    Attributes:
        tokens: places for tokens.
        rows: places for rows.
        longest: most tokens of a row.
        altered: whether a hook changes what the model computes.
        even: whether attention may leave the KV of each row whole, because no row's context is much
            longer than the others'. None if that is unknown, or makes no difference.
    """

    tokens: int
    rows: int
    longest: int
    altered: bool = False
    even: bool | None = None


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The shape of a head: places for logit rows, and its abilities."""

    logit_rows: int
    level: Level


@dataclass(frozen=True, slots=True)
class StepShape:
    """The shape of a body and a head that are captured as one program."""

    body: BodyShape
    head: HeadShape


class CapturedPrograms(Protocol):
    """Programs that can be replayed, by shape."""

    def body(self, step: BodyShape, skew: float = 1.0) -> BodyShape | None:
        """Returns the shape of the captured body that a step is padded to, or None.

        Args:
            step: the step's own shape.
            skew: see `StepPlan`.
        """
        ...

    def head(self, logit_rows: int, level: Level) -> HeadShape | None:
        """Returns the shape of the captured head that a step is padded to, or None."""
        ...

    def step(self, body: BodyShape, head: HeadShape) -> StepShape | None:
        """Returns the shape of the captured program of both, or None."""
        ...

    def replay(self, key: Any) -> None:
        """Launches a captured program."""
        ...


@dataclass(frozen=True, slots=True)
class BoundModel:
    """A model, bound to the lanes of a state. A second model may be bound to the same lanes.

    Attributes:
        layers: the model's KV, by layer.
        groups: indices of the model's KV groups among the state's groups.
        position: int32 [lanes], the next position that the model computes in each lane.
        ahead: offset of the input token relative to the position.
        fused: whether ops that join several may be used.
    """

    model: Any
    state: BatchState
    layers: Sequence[Any]
    groups: range
    position: Tensor
    ahead: int = 0
    fused: bool = False

    def forward(
        self,
        rows: StepRows,
        logit_rows: LogitRows,
        shape: BodyShape,
        *,
        drafts: Drafts | None = None,
        change: Callable[[ForwardBatch], None] | None = None,
        **inputs: Any,
    ) -> Tensor:
        """Computes the rows' tokens, and fills in `logit_rows`. Returns hidden states [T, width].

        Args:
            drafts: the claims after `place_drafts`, or None if no row has drafts.
            change: changes the batch before the model gets it.
            inputs: further inputs of the model.
        """
        groups = [(self.state.groups[i], self.state.tables[i]) for i in self.groups]
        paged = [(table, each.tokens_per_block) for each, table in groups if each.kind != "state"]
        states = [table for group, table in groups if group.kind == "state"]
        expanded, embedded, scratch = self._expand(rows, logit_rows, shape, paged, drafts)
        batch = ForwardBatch(
            input_ids=expanded.ids,
            positions=expanded.positions,
            query_start=rows.query_start,
            seq_lens=expanded.seq_lens,
            groups=(
                *(GroupBatch(*group, dict(scratch)) for group in expanded.groups),
                *(GroupBatch(rows.lanes, table, {"flags": rows.flags}) for table in states),
            ),
            q_lens=expanded.q_lens,
            max_q_len=shape.longest,
            max_seq_len=expanded.max_seq_len,
            even=shape.even,
            embedded=embedded,
        )
        if change is not None:
            change(batch)
        hidden: Tensor = self.model(batch, self.layers, **inputs)
        return hidden

    def most_skew(self, rows: int) -> float | None:
        """Returns the skew up to which decodes of `rows` rows are `even`, or None."""
        return self.model.most_skew(self.position[:rows], self.layers)  # type: ignore[no-any-return]

    def _expand(
        self,
        rows: StepRows,
        logit_rows: LogitRows,
        shape: BodyShape,
        tables: Sequence[tuple[Tensor, int]],
        drafts: Drafts | None,
    ) -> tuple[Expanded, Tensor | None, dict[str, Any]]:
        """Returns the tokens, their embeddings if they are known, and the groups' scratch."""
        decodes = shape.tokens == shape.rows and shape.longest == 1 and drafts is None
        front = self.model.decode_front(self.layers) if self.fused and decodes else None
        tokens, most = self.state.tokens[:, self.ahead :], self.state.limits.length
        if front is None:
            expanded = ops.expand_rows(
                rows, self.position, tokens, tables, logit_rows,
                num_tokens=shape.tokens, max_seq_len=most, drafts=drafts,
            )  # fmt: skip
            return expanded, None, {}
        weight, attention = front
        expanded, embedded, schedule = ops.expand_decodes(
            rows, self.position, tokens, tables[0], logit_rows, weight,
            max_seq_len=most, attention=attention, even=shape.even,
        )  # fmt: skip
        return expanded, embedded, {"schedule": schedule}


class StepProgram:
    """The programs of the model that gives the tokens.

    Args:
        drafts: the claims that bodies verify, or None.

    Attributes:
        hooks: in the order in which they take part.
        hidden: [tokens, width], final hidden states of the last body.
        last: [logit rows, width], the hidden states of its logit rows.
        held: [lanes, width], the hidden state of the last position of each lane whose row was late.
    """

    def __init__(
        self, bound: BoundModel, hooks: Sequence[ProgramHook], drafts: Drafts | None = None
    ) -> None:
        self.model: Decoder = bound.model
        self._state = state = bound.state
        self.bound = bound
        self.hooks = tuple(hooks)
        self._drafts = drafts
        limits, width = state.limits, self.model.spec.hidden_size
        options = {"dtype": self.model.dtype, "device": state.device}
        self.hidden = torch.zeros(limits.tokens, width, **options)
        self.last = torch.zeros(limits.logit_rows, width, **options)
        self.held = torch.zeros(limits.lanes, width, **options)

    def body(self, shape: BodyShape, *, shallow: bool = False) -> None:
        """Computes the step's tokens.

        Args:
            shallow: run only the first layers, up to one of each kind.
        """
        state, position = self._state, self.bound.position
        rows = state.rows.first(shape.rows)
        drafts = self._drafts if shape.longest > 1 else None
        if drafts is not None:
            ops.place_drafts(rows, position, state.tokens, drafts)
        logit_rows = state.logit_rows  # All of them, because heads may be padded more than bodies.
        for hook in self.hooks:
            hook.body(rows, shape.tokens, shape.altered)

        def change(batch: ForwardBatch) -> None:
            for hook in self.hooks:
                hook.batch(rows, batch, shape.altered)

        norm = self.model.last_norm if self.bound.fused else None
        hidden = self.bound.forward(
            rows,
            logit_rows,
            shape,
            drafts=drafts,
            change=change,
            shallow=shallow,
            normed=norm is None,
        )
        ops.collect_rows(
            hidden, rows, logit_rows, position, self.last, self.hidden, self.held, state.ring, norm
        )

    def head(self, shape: HeadShape) -> None:
        """Draws tokens for the logit rows, and advances the lanes of all rows."""
        state = self._state
        last = self.last[: shape.logit_rows]
        raw = self.model.logits(last)
        ctx = HeadContext(
            level=shape.level,
            state=state,
            rows=state.rows,
            logit_rows=state.logit_rows.first(shape.logit_rows),
            last=last,
            held=self.held,
            raw=raw,
            logits=raw,
            fused=self._fuses(shape),
        )
        for hook in self.hooks:
            hook.logits(ctx)
        for hook in self.hooks:
            hook.tokens(ctx)

    def _fuses(self, shape: HeadShape) -> bool:
        """Returns whether one op draws and accepts the tokens of a head."""
        plain = shape.level == Level.PLAIN and shape.logit_rows > 0
        return self.bound.fused and plain and not any(hook.changes_tokens for hook in self.hooks)
