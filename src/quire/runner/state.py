"""The state of a batch on the device: per-lane columns, the step's inputs, its results.

All of it that the host writes lies in one piece of memory, so that whatever a plan changes is one
copy to the device and one kernel.
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
from quire.ops import LogitRows, StepRows
from quire.plan import KVGroup

Words = TypeVar("Words", Tensor, Int32)

_ALIGNED = 32
"""Words: columns begin on multiples of 128 bytes."""
_MOST_WORDS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """A per-lane column [lanes, *shape] of int32 or float32 that starts as `fill`."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.int32
    fill: float = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that a step may hold, and a lane.

    lanes: rows. tokens: of a step. logit_rows: of a step. drafts: of a row. length: of a lane.
    """

    lanes: int
    tokens: int
    logit_rows: int
    length: int
    drafts: int = 0


class BatchState:
    """Named per-lane columns on the device, and the inputs of the step that runs.

    memory: int32 [words], which every column and the inputs are views of.
    tokens: int32 [lanes, max_len], every token of a lane's request.
    position: int32 [lanes], the first position that a lane computes next; for generating lanes the
        host does not know it.
    max_total, min_total: int32 [lanes], lengths at which a lane must, and before which it must not,
        end.
    tables: per KV group its block tables, int32 [lanes, blocks].
    inputs: int32, what a step's programs read of the plan: `rows`, `lines` and `gate`.
    logit_rows: of the step, filled in by its body.
    results: int32 [lanes, 3 + drafts], of the step's rows: how many tokens each gave, why it ends,
        and the tokens.
    """

    def __init__(
        self,
        limits: Limits,
        groups: Sequence[KVGroup],
        device: torch.device,
        columns: Sequence[ColumnSpec] = (),
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
            raise ConfigError("two hooks keep a column of the same name")
        shapes = [(limits.lanes, *spec.shape) for spec in specs]
        size = 4 * limits.lanes + 2 + limits.logit_rows + 3
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
        sizes = lanes, lanes + 1, lanes + 1, lanes, limits.logit_rows, 3
        self._ends = list(itertools.accumulate(sizes))
        own, query_start, logit_start, flags, self.lines, self.gate = self.split_inputs(self.inputs)
        self.rows = StepRows(own, query_start, logit_start, flags)
        self._idle = np.zeros(self._ends[-1], dtype=np.int32)
        for part in (0, 4, 5):
            self.split_inputs(self._idle)[part].fill(-1)
        self.logit_rows = LogitRows(
            *torch.full((4, limits.logit_rows), -1, dtype=torch.int32, device=device)
        )
        self.results = torch.zeros(lanes, 3 + limits.drafts, dtype=torch.int32, device=device)

    def split_inputs(self, inputs: Words) -> list[Words]:
        """Returns the parts of inputs: lanes, query_start, logit_start and flags of `rows`, the
        mask's line of each logit row, and the gate that the head waits for."""
        starts = (0, *self._ends)
        return [inputs[start:end] for start, end in itertools.pairwise(starts)]

    def idle_inputs(self) -> Int32:
        """Returns inputs of no rows, int32 on the host."""
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
            f"the state of all lanes takes {end} words, at most {_MOST_WORDS} are supported; "
            "lower max_num_seqs or max_model_len",
            "max_num_seqs",
        )
    memory = torch.zeros(end, dtype=torch.int32, device=device)
    views = [
        memory[start : start + math.prod(shape)].view(shape)
        for start, shape in zip(starts, shapes, strict=True)
    ]
    return memory, views
