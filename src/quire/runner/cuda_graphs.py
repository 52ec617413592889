"""Steps as CUDA graphs: a body graph per token bucket, a head graph per row bucket.

A replay costs the host some ten microseconds, where launching the kernels of a step one by one
costs milliseconds. Everything a graph needs is read on the device, from the batch state and from
one small input buffer: each row's lane, where its tokens begin, and whether it samples.
"""

from __future__ import annotations

import bisect
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.arrays import Int32
from quire.executor import FULL_STEP
from quire.layers.batch import ForwardBatch, GroupBatch
from quire.models import Decoder
from quire.ops import mask_logits
from quire.ops.triton.adjust import adjust
from quire.ops.triton.batch import expand_batch, finish_rows
from quire.ops.triton.launch import compiling
from quire.ops.triton.sampling import sample
from quire.plan import RowFlag, StepPlan
from quire.runner.batch_state import BatchState
from quire.runner.kv_cache import KVCache
from quire.runner.sampling import HeadKind, Sampler
from quire.runner.step import row_mask_lines

Progress = Callable[[int, int], None]
"""Told the graphs captured and the graphs in total."""


_HEADS = [(kind, masked) for masked in (False, True) for kind in HeadKind]
"""The kinds of head, and whether they take a mask."""
FEW_ROWS = 8
"""Mixed steps of so few rows have graphs of their own: rows of padding are not free."""


def decode_buckets(lanes: int) -> list[int]:
    """Row counts of steps in which every row computes one token."""
    return _up_to(lanes, [1, 2, 4, 8, *range(16, lanes + 16, 16)])


def mixed_buckets(tokens: int) -> list[int]:
    """Token counts of all other steps."""
    fine = [16, 32, 64, 128, 192, *range(256, 2048, 128), *range(2048, 2560, 256)]
    coarse = range(2560, tokens + 512, 512)
    return [size for size in _up_to(tokens, [*fine, *coarse]) if size > 1]


def full_step(seconds: Callable[[int], float], most: int) -> int:
    """The least tokens, by powers of two, of which twice as many take more than half as long again:
    of two such prompts the first tokens then come sooner, on average, one after the other than
    together. seconds: of a step of so many tokens; most: of any step."""
    seconds = functools.cache(seconds)
    tokens = min(FULL_STEP, most)
    while 2 * tokens <= most and seconds(2 * tokens) <= 1.5 * seconds(tokens):
        tokens *= 2
    return tokens


def _up_to(limit: int, sizes: list[int]) -> list[int]:
    return sorted({min(size, limit) for size in sizes})


def _at_least(sizes: list[int], wanted: int) -> int:
    """The smallest of the sorted sizes that holds `wanted`."""
    return sizes[bisect.bisect_left(sizes, wanted)]


class Work(NamedTuple):
    """A graph that is yet to be captured. run: what it does; shallow, it does each different thing
    at least once. keep: gets the graph and what `run` gave."""

    run: Callable[..., Any]
    keep: Callable[[torch.cuda.CUDAGraph, Any], None]


@dataclass(frozen=True)
class Body:
    """A captured body. Its tensors are overwritten by the next replay of any graph, so what reads
    them must be queued before that."""

    graph: torch.cuda.CUDAGraph
    batch: ForwardBatch
    hidden: Tensor


@dataclass(frozen=True)
class Head:
    """results: int32 [2, R], tokens and stop reasons. logits: [R, vocab] as the model gave them,
    where the head keeps them. Overwritten by the next replay, as a body's."""

    graph: torch.cuda.CUDAGraph
    results: Tensor
    logits: Tensor | None


class StepGraphs:
    """All graphs of a runner, in one memory pool.

    inputs: int32 [4 * rows + 1] on the device, filled before a replay with what `pack` gives.
    mask: int32 [rows, words], what masked heads read, a line for each GATED row.
    """

    def __init__(
        self, model: Decoder, cache: KVCache, state: BatchState, sampler: Sampler, max_tokens: int
    ) -> None:
        self._model = model
        self._cache = cache
        self._state = state
        self._sampler = sampler
        self.max_rows = rows = state.num_lanes
        self.max_tokens = max_tokens
        device = state.device
        self.inputs = torch.empty(4 * rows + 1, dtype=torch.int32, device=device)
        self._lanes, self._starts, self._samples, self._lines = torch.split(
            self.inputs, [rows, rows + 1, rows, rows]
        )
        self._last = torch.zeros(rows, model.spec.hidden_size, dtype=model.dtype, device=device)
        self._pool = torch.cuda.graph_pool_handle()
        self._decode_sizes, self._mixed_sizes = decode_buckets(rows), mixed_buckets(max_tokens)
        # Few of those with masks, which would double the captures.
        self._masked_sizes = [size for size in self._decode_sizes if size & (size - 1) == 0]
        self._masked_sizes = sorted({*self._masked_sizes, self._decode_sizes[-1]})
        # By token places and row places: as many of both where every row computes one token.
        self._bodies: dict[tuple[int, int], Body] = {}
        # By row places, kind, and whether it takes a mask.
        self._heads: dict[tuple[int, HeadKind, bool], Head] = {}
        # Logits for masked heads, by row places.
        self._scores: dict[int, torch.cuda.CUDAGraph] = {}
        self._stops = sampler.stops
        vocab = model.spec.vocab_size
        self._logits = torch.empty(rows, vocab, dtype=model.dtype, device=device)
        self.mask = torch.full((rows, -(-vocab // 32)), -1, dtype=torch.int32, device=device)

    # -- capture -------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self, progress: Progress | None = None) -> None:
        """Captures every bucket, largest first, so that the smaller ones fit in its memory."""
        works = *self._planned_bodies(), *self._planned_scores(), *self._planned_heads()
        self._capture(works, progress)

    def _capture(self, works: Sequence[Work], progress: Progress | None = None) -> None:
        self.inputs.copy_(torch.from_numpy(self._idle()))
        # Kernels are compiled on all cores, then loaded by running once: neither may happen within
        # a capture.
        with compiling(os.cpu_count() or 1):
            for work in works:
                work.run(shallow=True)
        for work in works:
            work.run(shallow=True)
        stream = torch.cuda.Stream(self._state.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        for done, work in enumerate(works):
            if progress is not None:
                progress(done, len(works))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=self._pool)
                try:
                    out = work.run(shallow=False)
                finally:
                    graph.capture_end()
            work.keep(graph, out)
        if progress is not None:
            progress(len(works), len(works))
        torch.cuda.synchronize(self._state.device)

    def _planned_bodies(self) -> Iterator[Work]:
        for tokens in reversed(self._mixed_sizes):
            for rows in sorted({self._most(tokens), min(FEW_ROWS, self._most(tokens))})[::-1]:
                yield self._planned_body(tokens, rows, decode=False)
        for rows in reversed(self._decode_sizes):
            yield self._planned_body(rows, rows, decode=True)

    def _planned_body(self, tokens: int, rows: int, *, decode: bool) -> Work:
        def keep(graph: torch.cuda.CUDAGraph, out: tuple[ForwardBatch, Tensor]) -> None:
            self._bodies[tokens, rows] = Body(graph, *out)

        return Work(functools.partial(self._body, tokens, rows, decode), keep)

    def _planned_scores(self) -> Iterator[Work]:
        for rows in reversed(self._masked_sizes):
            yield self._planned_score(rows)

    def _planned_score(self, rows: int) -> Work:
        def keep(graph: torch.cuda.CUDAGraph, out: Tensor) -> None:
            self._scores[rows] = graph

        def run(*, shallow: bool) -> Tensor:
            return self._logits[:rows].copy_(self._model.scores(self._last[:rows]))

        return Work(run, keep)

    def _planned_heads(self) -> Iterator[Work]:
        for rows in reversed(self._decode_sizes):
            for kind, masked in _HEADS:
                if not masked or rows in self._masked_sizes:
                    yield self._planned_head(rows, kind, masked)

    def _planned_head(self, rows: int, kind: HeadKind, masked: bool) -> Work:
        def keep(graph: torch.cuda.CUDAGraph, results: Tensor) -> None:
            kept = self._logits[:rows] if kind is HeadKind.ADJUST else None
            self._heads[rows, kind, masked] = Head(graph, results, kept)

        return Work(lambda *, shallow: self._head(rows, kind, masked), keep)

    def _most(self, tokens: int) -> int:
        """Rows that a mixed step of so many tokens can have: one of them has more than one."""
        return min(tokens - 1, self.max_rows)

    def _body(
        self, tokens: int, rows: int, decode: bool, shallow: bool
    ) -> tuple[ForwardBatch, Tensor]:
        state = self._state
        starts = self._starts[: rows + 1]
        ids, positions, seq_lens, groups = expand_batch(
            self._lanes[:rows],
            starts,
            state.position,
            state.tokens,
            [
                (table, group.tokens_per_block)
                for table, group in zip(state.tables, state.groups, strict=True)
            ],
            num_tokens=tokens,
            max_seq_len=state.max_len,
        )
        batch = ForwardBatch(
            input_ids=ids,
            positions=positions,
            query_start=starts,
            seq_lens=seq_lens,
            groups=tuple(GroupBatch(slots, table) for slots, table in groups),
            q_lens=(),
            max_q_len=1 if decode else tokens,
            max_seq_len=state.max_len,
        )
        hidden = self._model(batch, self._cache.layers, shallow=shallow)
        last = hidden if decode else hidden[(starts[1:] - 1).clamp_(min=0)]
        self._last[:rows].copy_(last)
        return batch, hidden

    def _head(self, rows: int, kind: HeadKind, masked: bool) -> Tensor:
        state, sampler = self._state, self._sampler
        lanes, starts = self._lanes[:rows], self._starts[: rows + 1]
        logits = self._logits[:rows] if masked else self._model.scores(self._last[:rows])
        own = lanes.clamp(min=0).long()
        length = state.position[own] + starts[1:] - starts[:-1]
        adjusts = kind is HeadKind.ADJUST
        if adjusts:
            # The graphs share their memory, and log-probabilities are read after the replay.
            if masked:
                logits = logits.clone()
            else:
                self._logits[:rows].copy_(logits)
            logits = self._adjusted(logits, lanes, length)
        if masked:
            mask_logits(logits, self.mask, self._lines[:rows])
        tokens = sample(
            logits,
            lanes,
            length,
            temperature=sampler.floats[:, 0],
            top_k=sampler.ints[:, 0],
            top_p=sampler.floats[:, 1],
            min_p=sampler.floats[:, 2],
            seed=sampler.ints[:, 1:3],
            sample_index=sampler.ints[:, 3],
            truncate=kind >= HeadKind.TRUNCATE,
        )
        return finish_rows(
            lanes,
            starts,
            self._samples[:rows],
            tokens,
            position=state.position,
            tokens=state.tokens,
            max_total=state.max_total,
            min_total=state.min_total,
            stops=sampler.stops,
            counts=sampler.adjust.counts if adjusts else None,
        )

    def _adjusted(self, logits: Tensor, lanes: Tensor, length: Tensor) -> Tensor:
        sampler = self._sampler
        columns = sampler.adjust
        return adjust(
            logits,
            lanes,
            length,
            repetition=sampler.floats[:, 3],
            presence=sampler.floats[:, 4],
            frequency=sampler.floats[:, 5],
            counts=columns.counts,
            num_bias=columns.num_bias,
            bias_ids=columns.bias_ids,
            bias_values=columns.bias_values,
            stops=sampler.stops,
            min_total=self._state.min_total,
        )

    # -- replay --------------------------------------------------------------------------------

    def fits(self, plan: StepPlan) -> bool:
        return 0 < plan.num_rows <= self.max_rows and plan.num_tokens <= self.max_tokens

    def pack(self, plan: StepPlan) -> Int32:
        """A plan's rows as the graphs read them: lanes (-1: padding), where their tokens begin,
        whether they sample, and their lines of the mask (-1: none)."""
        packed = self._idle()
        rows, most = plan.num_rows, self.max_rows
        packed[:rows] = plan.lanes
        np.cumsum(plan.q_len, out=packed[most + 1 : most + 1 + rows])
        packed[most + 1 + rows : 2 * most + 1] = plan.q_len.sum()
        packed[2 * most + 1 : 2 * most + 1 + rows] = (plan.flags & RowFlag.SAMPLE) != 0
        if plan.gated:
            packed[3 * most + 1 : 3 * most + 1 + rows] = row_mask_lines(plan)
        return packed

    def _idle(self) -> Int32:
        packed = np.zeros(4 * self.max_rows + 1, dtype=np.int32)
        packed[: self.max_rows] = packed[3 * self.max_rows + 1 :] = -1
        return packed

    def body(self, plan: StepPlan) -> Body:
        """Replays the smallest body that holds the plan; `inputs` must be filled."""
        if plan.num_tokens == plan.num_rows:
            tokens = rows = _at_least(self._decode_sizes, plan.num_tokens)
        else:
            tokens = _at_least(self._mixed_sizes, plan.num_tokens)
            most = self._most(tokens)
            rows = min(FEW_ROWS, most) if plan.num_rows <= FEW_ROWS else most
        body = self._bodies[tokens, rows]
        body.graph.replay()
        return body

    def seconds(self, tokens: int) -> float:
        """How long the body for so many tokens of few rows takes, without attention."""
        body = self._bodies[tokens, min(FEW_ROWS, self._most(tokens))]
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        body.graph.replay()
        begin.record()
        body.graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def scores(self, rows: int) -> None:
        """Replays what a masked head begins with, which need not wait for the mask."""
        self._scores[_at_least(self._masked_sizes, rows)].replay()

    def head(self, rows: int, kind: HeadKind, *, masked: bool = False) -> Head:
        """Replays the smallest head for so many rows, those of the body that was replayed last.
        Before a masked one goes `scores`."""
        if self._stops is not self._sampler.stops:
            self._recapture_heads()
        sizes = self._masked_sizes if masked else self._decode_sizes
        head = self._heads[_at_least(sizes, rows), kind, masked]
        head.graph.replay()
        return head

    def _recapture_heads(self) -> None:
        """A request brought more stop tokens than there was room for: the table has moved."""
        held = self.inputs.clone()
        self._capture([*self._planned_heads()])
        self.inputs.copy_(held)
        self._stops = self._sampler.stops
