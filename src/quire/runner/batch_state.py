"""What the device remembers of every lane between steps, and how a plan's diff changes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.arrays import Int32, int32
from quire.layers.batch import ForwardBatch, GroupBatch
from quire.plan import Admit, KVGroup, StepPlan
from quire.runner.staging import Array, Upload
from quire.runner.step import Step


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """A per-lane column [lanes, *shape] that starts as `fill`; int32 or float32 if plans write to
    it."""

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

    def stage(self, plan: StepPlan, upload: Upload) -> None:
        """Adds the plan's changes of lanes, tables and features' columns to the upload."""
        if plan.admits:
            self._stage_admits(plan.admits, upload)
        for table, appends in zip(self.tables, plan.block_appends, strict=False):
            if len(appends.ids):
                places = _ragged(appends.lanes, appends.starts, appends.counts, table.shape[1])
                upload.put(table, places, appends.ids)
        for name, (lanes, values) in plan.writes.items():
            column = self.columns[name]
            kind = np.float32 if column.dtype == torch.float32 else np.int32
            self.put(upload, column, lanes, values.astype(kind))

    @staticmethod
    def put(upload: Upload, column: Tensor, lanes: Int32, values: Array) -> None:
        """The column's whole lines of `lanes` int32 [n]; values [n, ...] in the column's type."""
        width = column[0].numel()
        places = lanes.astype(np.int64)[:, None] * width + np.arange(width)
        upload.put(column, places.reshape(-1), values)

    def _stage_admits(self, admits: Sequence[Admit], upload: Upload) -> None:
        lanes = int32([admit.lane for admit in admits])
        computed = int32([admit.computed for admit in admits])
        prompts = int32([admit.prompt_len for admit in admits])
        least = int32([admit.params.min_tokens for admit in admits])
        self.bound[lanes] = computed
        upload.put(self.position, lanes, computed)
        upload.put(self.prompt_len, lanes, prompts)
        upload.put(self.min_total, lanes, prompts + least)
        upload.put(self.max_total, lanes, int32([admit.max_total for admit in admits]))
        lengths = int32([len(admit.tokens) for admit in admits])
        places = _ragged(lanes, np.zeros_like(lanes), lengths, self.max_len)
        upload.put(self.tokens, places, np.concatenate([admit.tokens for admit in admits]))

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
            step = Step(plan, batch, first)
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


def _ragged(rows: Int32, starts: Int32, counts: Int32, stride: int) -> Array:
    """Flat places of `counts[i]` entries of line `rows[i]` from column `starts[i]` on."""
    ends = np.cumsum(counts)
    base = rows.astype(np.int64) * stride + starts - (ends - counts)
    return np.repeat(base, counts) + np.arange(ends[-1] if len(ends) else 0)
