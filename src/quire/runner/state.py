"""The state of a batch on the device: per-lane columns, the step's inputs, its results.

The parts that the host writes are in one piece of memory. So all changes of a plan take one copy to
the device and one kernel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from quire.arrays import Int32
from quire.errors import ConfigError
from quire.ops import LogitRows, ResultRing, StepRows
from quire.plan import KVGroup

Words = TypeVar("Words", Tensor, Int32)

_ALIGNED = 32
"""Words: columns begin on multiples of 128 bytes."""
_MOST_WORDS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """A per-lane column [lanes, *shape] of int32 or float32, filled with `fill` at first."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.int32
    fill: float = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of steps and lanes.

    Attributes:
        lanes: number of lanes, and most rows of a step.
        tokens: most tokens of a step.
        logit_rows: most logit rows of a step.
        length: most tokens of a lane's request.
        drafts: most draft tokens of a row.
        rare: whether few steps have drafts.
    """

    lanes: int
    tokens: int
    logit_rows: int
    length: int
    drafts: int = 0
    rare: bool = False


class BatchState:
    """Named per-lane columns on the device, and the inputs of the current step.

    Attributes:
        memory: int32 [words]. All columns and the inputs are views of it.
        columns: all columns, by name.
        tokens: int32 [lanes, length], all tokens of each lane's request.
        position: int32 [lanes], the next position that each lane computes. The host does not know
            it for generating lanes.
        max_total: int32 [lanes], greatest length of a lane's request.
        min_total: int32 [lanes], least length at which a lane's request may end.
        tables: block tables of each KV group, int32 [lanes, blocks].
        inputs: int32, the part of the plan that programs read: `rows`, `lines` and `gate`.
        rows: the step's rows, views of `inputs`.
        lines: int32 [logit rows], the line of the host's inputs of each logit row, a view of
            `inputs`.
        gate: int32 [2], see `HostInputs.gate`, a view of `inputs`.
        logit_rows: the step's logit rows. The body fills them in.
        results: int32 [lanes, 3 + drafts], by row of the step: number of new tokens, stop reason,
            and the tokens.
        ring: the results of the last steps, in host memory.
        cuts: int32 [logit rows, 2], which tokens truncation keeps; see `ops.sample`. None unless a
            hook reads it.
        cuts_level: least `Level` of heads that write `cuts`.
    """

    cuts: Tensor | None = None
    cuts_level = 0

    def __init__(
        self,
        limits: Limits,
        groups: Sequence[KVGroup],
        device: torch.device,
        columns: Sequence[ColumnSpec] = (),
        slots: int = 2,
    ) -> None:
        self.limits = limits
        self.device = device
        self.groups = tuple(groups)
        specs = [
            ColumnSpec("tokens", (limits.length,)),
            ColumnSpec("position"),
            ColumnSpec("min_total"),
            ColumnSpec("max_total"),
            *(
                ColumnSpec(f"table.{i}", (group.table_width(limits.length),))
                for i, group in enumerate(self.groups)
            ),
            *columns,
        ]
        self.specs = {spec.name: spec for spec in specs}
        if len(self.specs) != len(specs):
            names = [spec.name for spec in specs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"two hooks keep a column named {twice!r}")
        shapes = [(limits.lanes, *spec.shape) for spec in specs]
        size = 4 * limits.lanes + 2 + limits.logit_rows + 2 + 1
        self.memory, views = _lay_out([*shapes, (size,)], device)
        self.columns: dict[str, Tensor] = {}
        for spec, view in zip(specs, views, strict=False):
            column = view if spec.dtype == torch.int32 else view.view(spec.dtype)
            self.columns[spec.name] = column.fill_(spec.fill)
        self.tokens = self.columns["tokens"]
        self.position = self.columns["position"]
        self.min_total = self.columns["min_total"]
        self.max_total = self.columns["max_total"]
        self.tables = [self.columns[f"table.{i}"] for i in range(len(self.groups))]
        self.inputs = views[-1]
        lanes = limits.lanes
        sizes = lanes, lanes + 1, lanes + 1, lanes, limits.logit_rows, 2, 1
        self._ends = list(itertools.accumulate(sizes))
        own, query_start, logit_start, flags, *rest = self.split_inputs(self.inputs)
        self.lines, self.gate, turn = rest
        self.rows = StepRows(own, query_start, logit_start, flags)
        self._idle = np.zeros(self._ends[-1], dtype=np.int32)
        for part in (0, 4, 5):
            self.split_inputs(self._idle)[part].fill(-1)
        self.logit_rows = LogitRows(
            *torch.full((4, limits.logit_rows), -1, dtype=torch.int32, device=device)
        )
        self.results = torch.zeros(lanes, 3 + limits.drafts, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        lines = torch.zeros(slots, *self.results.shape, dtype=torch.int32, pin_memory=pinned)
        self.ring = ResultRing(lines, turn)

    def split_inputs(self, inputs: Words) -> list[Words]:
        """Returns views: lanes, query_start, logit_start, flags, `lines`, `gate`, turn."""
        starts = (0, *self._ends)
        return [inputs[start:end] for start, end in itertools.pairwise(starts)]

    def idle_inputs(self) -> Int32:
        """Returns inputs without rows, int32 on the host."""
        return self._idle.copy()


def _lay_out(
    shapes: Sequence[tuple[int, ...]], device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Returns int32 memory, and a view of it for each shape."""
    starts, end = [], 0
    for shape in shapes:
        starts.append(end)
        end += -(-math.prod(shape) // _ALIGNED) * _ALIGNED
    if end > _MOST_WORDS:
        raise ConfigError(
            f"the batch state of all lanes takes {end} words, but at most {_MOST_WORDS} are "
            "supported; lower max_num_seqs or max_model_len",
            "max_num_seqs",
        )
    memory = torch.zeros(end, dtype=torch.int32, device=device)
    views = [
        memory[start : start + math.prod(shape)].view(shape)
        for start, shape in zip(starts, shapes, strict=True)
    ]
    return memory, views
