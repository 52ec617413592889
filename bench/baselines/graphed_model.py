"""The plain decoder with its steps captured as CUDA graphs, so that launches cost no time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from plain_model import PlainModel
from torch import Tensor

_COLUMNS = 128
"""Lengths are padded to a multiple of this, because each length needs a graph of its own."""


@dataclass
class _Graph:
    """A captured step.

    Attributes:
        inputs: the buffers that it reads: see `GraphedModel._inputs`.
        output: int64 [rows], the likeliest tokens.
    """

    inputs: dict[str, Tensor]
    output: Tensor
    replay: Callable[[], None]

    def run(self, given: dict[str, Tensor]) -> Tensor:
        for name, buffer in self.inputs.items():
            found = given[name]
            if name == "mask":
                buffer.zero_()
                # A row that is not there sees one column: NaN would stay in the cache.
                buffer[len(found) :, ..., 0] = True
            buffer[tuple(slice(size) for size in found.shape)] = found
        self.replay()
        return self.output.clone()


class GraphedModel(PlainModel):
    """Replays decode steps and whole texts; prompts over a cache run as they are.

    Rows and lengths are padded: rows to a power of two, lengths to a multiple of `_COLUMNS`.
    """

    def __init__(self, plain: PlainModel) -> None:
        self.__dict__.update(plain.__dict__)
        self._caches: dict[int, Tensor] = {}
        self._graphs: dict[tuple[int, int, bool], _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def cache(self, rows: int, longest: int) -> Tensor:
        """Returns a cache of at least this size. A later call may return the same one."""
        size = _padded_rows(rows)
        found = self._caches.get(size)
        if found is None or found.shape[4] < longest:
            found = self._caches[size] = super().cache(size, -(-longest // _COLUMNS) * _COLUMNS)
            self._graphs = {key: g for key, g in self._graphs.items() if key[0] != size or key[2]}
        return found[:, :, :rows]

    def capture(self, rows: int, longest: int) -> None:
        """Captures all steps of a batch of `rows` rows, and for one row whole texts too."""
        self.cache(rows, longest)
        for columns in range(_COLUMNS, longest + _COLUMNS, _COLUMNS):
            self._graph(_padded_rows(rows), columns, whole=False)
            if rows == 1:
                self._graph(1, columns, whole=True)

    def step(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: Tensor | None = None,
        slots: Tensor | None = None,
        mask: Tensor | None = None,
        last: Tensor | None = None,
    ) -> Tensor:
        rows, new = ids.shape
        if cache is None:
            columns, whole = -(-new // _COLUMNS) * _COLUMNS, True
            given = {"ids": ids, "positions": positions}
            given["last"] = torch.full((rows,), new - 1, device=self.device)
        elif new > 1 or mask is None or slots is None:
            return super().step(ids, positions, cache, slots, mask, last)
        else:
            columns, whole = -(-mask.shape[-1] // _COLUMNS) * _COLUMNS, False
            given = {"ids": ids, "positions": positions, "slots": slots, "mask": mask}
        size = rows if whole else _padded_rows(rows)
        return self._graph(size, columns, whole).run(given)[:rows]

    def _graph(self, rows: int, columns: int, whole: bool) -> _Graph:
        key = rows, columns, whole
        if key not in self._graphs:
            self._graphs[key] = self._captured(rows, columns, whole)
        return self._graphs[key]

    def _inputs(self, rows: int, columns: int, whole: bool) -> dict[str, Tensor]:
        """Returns buffers for the arguments of `PlainModel.step`."""

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=self.device)

        if whole:
            text = rows, columns
            return {"ids": ints(*text), "positions": ints(*text), "last": ints(rows)}
        mask = torch.ones(rows, 1, 1, columns, dtype=torch.bool, device=self.device)
        one = rows, 1
        # A capture may happen between two steps: it writes a column that no row has yet.
        slots = ints(*one) + columns - 1
        return {"ids": ints(*one), "positions": ints(*one), "slots": slots, "mask": mask}

    def _captured(self, rows: int, columns: int, whole: bool) -> _Graph:
        inputs = self._inputs(rows, columns, whole)
        cache = None if whole else self._caches[rows]
        output = torch.zeros(rows, dtype=torch.int64, device=self.device)

        def run() -> None:
            output.copy_(super(GraphedModel, self).step(**inputs, cache=cache))

        if self._pool is None:
            return _Graph(inputs, output, run)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return _Graph(inputs, output, graph.replay)


def _padded_rows(rows: int) -> int:
    return 1 << (rows - 1).bit_length()
