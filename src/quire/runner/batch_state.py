"""What the device remembers of every lane between steps, and how a plan's diff changes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.layers.batch import ForwardBatch, GroupBatch
from quire.plan import BlockAppends, Int32, KVGroup, StepPlan, int32
from quire.runner.staging import Upload
from quire.runner.step import LogitRows, Step

Finish = Callable[[], Any]
"""Work on the device that waits for the upload."""


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """A per-lane column [lanes, *shape] that starts as `fill`."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.int32
    fill: float = 0


class BatchState:
    """A registry of named per-lane columns on the device.

    tokens: int32 [lanes, max_len], every token of a lane's request. position: how many of them are
    computed; the host does not know it for generating lanes. max_total, prompt_len, min_total:
    lengths at which it must, and before which it must not, end. tables: per KV group, int32
    [lanes, blocks].
    """

    def __init__(
        self,
        lanes: int,
        max_len: int,
        groups: Sequence[KVGroup],
        device: torch.device,
    ) -> None:
        self.num_lanes = lanes
        self.max_len = max_len
        self.device = device
        self.groups = tuple(groups)
        self.columns: dict[str, Tensor] = {}
        self.tokens = self.add(ColumnSpec("tokens", (max_len,)))
        self.position = self.add(ColumnSpec("position"))
        self.prompt_len = self.add(ColumnSpec("prompt_len"))
        self.min_total = self.add(ColumnSpec("min_total"))
        self.max_total = self.add(ColumnSpec("max_total"))
        self.tables = [
            self.add(ColumnSpec(f"table.{i}", (-(-max_len // group.tokens_per_block),)))
            for i, group in enumerate(self.groups)
        ]
        # What the host knows of a lane's length, exact while it owns the positions and an upper
        # bound afterwards: the model's launch shapes come from it.
        self.bound = np.zeros(lanes, dtype=np.int64)

    def add(self, spec: ColumnSpec) -> Tensor:
        column = torch.full(
            (self.num_lanes, *spec.shape), spec.fill, dtype=spec.dtype, device=self.device
        )
        self.columns[spec.name] = column
        return column

    # -- what changes between steps ------------------------------------------------------------

    def stage(self, plan: StepPlan, upload: Upload) -> Finish:
        """Adds the plan's changes of lanes and tables to the upload."""
        finishes = [
            self._stage_admits(plan, upload),
            *(
                self._stage_appends(self.tables[i], appends, upload)
                for i, appends in enumerate(plan.block_appends)
                if len(appends.ids)
            ),
            *(
                self._stage_write(self.columns[name], lanes, values, upload)
                for name, (lanes, values) in plan.writes.items()
            ),
        ]
        return lambda: [finish() for finish in finishes]

    def _stage_admits(self, plan: StepPlan, upload: Upload) -> Finish:
        admits = plan.admits
        if not admits:
            return _nothing
        lanes = int32([admit.lane for admit in admits])
        self.bound[lanes] = [admit.computed for admit in admits]
        values = int32(
            [
                (a.computed, a.prompt_len, a.prompt_len + a.params.min_tokens, a.max_total)
                for a in admits
            ]
        )
        lengths = int32([len(admit.tokens) for admit in admits])
        places = _ragged(lanes, np.zeros_like(lanes), lengths, self.max_len)
        keys = [
            upload.add(x)
            for x in (lanes, values, places, np.concatenate([a.tokens for a in admits]))
        ]

        def finish() -> None:
            rows, ints, where, tokens = (upload[key] for key in keys)
            self.tokens.view(-1)[where.long()] = tokens
            columns = self.position, self.prompt_len, self.min_total, self.max_total
            for i, column in enumerate(columns):
                column[rows.long()] = ints[:, i]

        return finish

    def _stage_appends(self, table: Tensor, appends: BlockAppends, upload: Upload) -> Finish:
        places = _ragged(appends.lanes, appends.starts, appends.counts, table.shape[1])
        where, ids = upload.add(places), upload.add(appends.ids)

        def finish() -> None:
            table.view(-1)[upload[where].long()] = upload[ids]

        return finish

    def _stage_write(self, column: Tensor, lanes: Int32, values: Int32, upload: Upload) -> Finish:
        where, what = upload.add(lanes), upload.add(values)

        def finish() -> None:
            column[upload[where].long()] = upload[what].view(-1, *column.shape[1:]).to(column.dtype)

        return finish

    # -- the step's batch ----------------------------------------------------------------------

    def expand(self, plan: StepPlan, upload: Upload) -> Callable[[], Step]:
        """Adds the rows to the upload; the result builds the step once that is sent and the lanes
        are up to date."""
        lanes, q_len = plan.lanes, plan.q_len
        starts = np.zeros(plan.num_rows + 1, dtype=np.int32)
        np.cumsum(q_len, out=starts[1:])
        row_of = np.repeat(np.arange(plan.num_rows, dtype=np.int32), q_len)
        offset = np.arange(len(row_of), dtype=np.int32) - starts[row_of]
        keys = [upload.add(x) for x in (lanes, q_len, starts, row_of, offset)]
        first = self.grow(plan)
        max_seq_len = int(self.bound[lanes].max(initial=0))
        q_lens = tuple(q_len.tolist())

        def build() -> Step:
            lane, lengths, query_start, row, place = (upload[key] for key in keys)
            lane, row = lane.long(), row.long()
            position = self.position[lane]
            positions = position[row] + place
            token_lane = lane[row]
            where = token_lane * self.max_len + positions
            batch = ForwardBatch(
                input_ids=self.tokens.view(-1)[where],
                positions=positions,
                query_start=query_start,
                seq_lens=position + lengths,
                groups=tuple(
                    self._group(i, lane, token_lane, positions, max_seq_len)
                    for i in range(len(self.groups))
                ),
                q_lens=q_lens,
                max_q_len=max(q_lens, default=0),
                max_seq_len=max_seq_len,
            )
            step = Step(plan, batch, first, LogitRows.of(plan))
            step.lanes, step.position = lane, position + lengths
            return step

        return build

    def grow(self, plan: StepPlan) -> Int32:
        """Counts a plan's tokens; each row's first position (an upper bound where the device alone
        knows it), int32 [R]."""
        first = self.bound[plan.lanes]
        self.bound[plan.lanes] = np.minimum(first + plan.q_len, self.max_len)
        return int32(first)

    def locate(self, step: Step, lanes: Tensor) -> None:
        """Tells a step its rows' lanes, int32 [R] on the device, and where it leaves them."""
        step.lanes = lanes.long()
        starts = step.batch.query_start[: step.plan.num_rows + 1]
        step.position = self.position[step.lanes] + starts[1:] - starts[:-1]

    def _group(
        self, index: int, lane: Tensor, token_lane: Tensor, positions: Tensor, max_seq_len: int
    ) -> GroupBatch:
        table, size = self.tables[index], self.groups[index].tokens_per_block
        columns = -(-max_seq_len // size)
        block = torch.div(positions, size, rounding_mode="floor")
        blocks = table.view(-1)[token_lane * table.shape[1] + block]
        slots = blocks.long() * size + (positions - block * size)
        return GroupBatch(slots=slots, block_table=table[:, :columns].index_select(0, lane))

    def advance(self, step: Step, rows: Int32, tokens: Tensor | None) -> None:
        """Moves the lanes of `rows` (int32, host) past what was computed, and appends the tokens
        int32 [n] sampled for them (None: nothing was)."""
        everyone = len(rows) == step.plan.num_rows
        pick = None if everyone else torch.from_numpy(rows).to(self.device).long()
        lanes = step.lanes if pick is None else step.lanes[pick]
        position = step.position if pick is None else step.position[pick]
        self.position[lanes] = position
        if tokens is not None:
            where = lanes * self.max_len + position.clamp(max=self.max_len - 1)
            self.tokens.view(-1)[where] = tokens


def _nothing() -> None:
    return None


def _ragged(rows: Int32, starts: Int32, counts: Int32, stride: int) -> Int32:
    """Flat places of `counts[i]` entries of line `rows[i]` from column `starts[i]` on."""
    ends = np.cumsum(counts)
    base = rows.astype(np.int64) * stride + starts - (ends - counts)
    return int32(np.repeat(base, counts) + np.arange(ends[-1] if len(ends) else 0))
