"""Programs as CUDA graphs: a body per token bucket, a head per bucket of logit rows and level.

If a hook can change what the model computes, bodies are captured with and without that change.

A replay takes the host about ten microseconds. Launching the kernels of a step one by one takes
milliseconds.
"""

from __future__ import annotations

import bisect
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from quire.executor import FULL_STEP
from quire.layers.async_tp import HalvesGroup
from quire.ops.launches import compiling
from quire.parallel.torch_group import sum_over_all_ranks
from quire.runner.hooks.hook import Level
from quire.runner.program import BodyShape, HeadShape, StepProgram, StepShape
from quire.runner.state import Limits

Progress = Callable[[int, int], None]
"""Called with the number of captured graphs, and the number of all graphs."""

FEW_ROWS = 8
"""Mixed steps of at most this many rows have graphs of their own, because padded rows cost time."""
_SHORT_TEXT, _LONG_TEXT = 128, 512
"""Lengths of an encoder's texts for which bodies are captured, besides the longest."""
SHORT_ROW = 8
"""Most tokens of a row that short-row kernels take: one, and drafts."""


def row_buckets(most: int) -> list[int]:
    """Returns the row counts that steps of one token a row, and heads, are padded to."""
    return _up_to(most, [1, 2, 4, 8, *range(16, most, 16)])


def decode_buckets(limits: Limits) -> list[int]:
    """Returns the row counts that decodes are padded to."""
    return row_buckets(min(limits.lanes, limits.tokens))


def mixed_buckets(tokens: int) -> list[int]:
    """Returns the token counts that all other steps are padded to."""
    fine = [16, 32, 64, 128, 192, *range(256, 2048, 128), *range(2048, 2560, 256)]
    coarse = range(2560, tokens + 512, 512)
    return [size for size in _up_to(tokens, [*fine, *coarse]) if size > 1]


def full_step(seconds: Callable[[int], float], most: int) -> int:
    """Returns the number of prompt tokens that fill a step.

    It is the first power of two (from `FULL_STEP` on) for which a step of twice as many tokens
    takes more than 1.5 times as long. From that size on, two prompts get their first tokens sooner,
    on average, in two steps than in one.

    Args:
        seconds: returns how long a step of the given number of tokens takes.
        most: most tokens of a step.
    """
    seconds = functools.cache(seconds)
    tokens = min(FULL_STEP, most)
    while 2 * tokens <= most and seconds(2 * tokens) <= 1.5 * seconds(tokens):
        tokens *= 2
    return tokens


def _up_to(limit: int, sizes: Sequence[int]) -> list[int]:
    return sorted({min(size, limit) for size in (*sizes, limit)})


def _at_least(sizes: Sequence[int], size: int) -> int:
    """Returns the smallest of the sorted sizes that is at least `size`."""
    return sizes[bisect.bisect_left(sizes, size)]


class Buckets:
    """The shapes to which steps are padded.

    Attributes:
        most_skew: the skew up to which decodes are even, by each number of rows for which it
            matters. Decodes of such a number have two bodies.
    """

    def __init__(self, limits: Limits, most_skew: Mapping[int, float] | None = None) -> None:
        self._limits = limits
        self.most_skew = most_skew or {}
        self._rows = decode_buckets(limits)
        self._mixed = mixed_buckets(limits.tokens)
        self._logit_rows = _up_to(
            limits.logit_rows, [*self._rows, *range(limits.lanes, limits.logit_rows, 64)]
        )
        # Rows with a few drafts have a logit row for each token.
        most = min(limits.tokens, limits.logit_rows)
        sizes = [8, 16, 32, 64, *range(128, most, 64)] if limits.rare else self._logit_rows
        short = _up_to(most, sizes)
        self._short = [size for size in short if size > 1] if limits.drafts else []

    def bodies(self) -> list[BodyShape]:
        """Returns all shapes of bodies, largest first."""
        mixed = [
            BodyShape(tokens, rows, tokens)
            for tokens in self._mixed
            for rows in sorted({min(FEW_ROWS, self._most_rows(tokens)), self._most_rows(tokens)})
        ]
        short = [BodyShape(tokens, self._most_rows(tokens), SHORT_ROW) for tokens in self._short]
        decode = [
            BodyShape(rows, rows, 1, even=even)
            for rows in self._rows
            for even in ((False, True) if rows in self.most_skew else (False,))
        ]
        return [*reversed(mixed), *reversed(short), *reversed(decode)]

    def heads(self) -> list[HeadShape]:
        """Returns all shapes of heads, largest first."""
        levels = [level for level in Level if level < Level.UNCAPTURED]
        return [HeadShape(rows, level) for rows in reversed(self._logit_rows) for level in levels]

    def steps(self) -> list[StepShape]:
        """Returns the shapes of plain decode steps, whose body and head are one program."""
        return [
            StepShape(body, HeadShape(body.rows, Level.PLAIN))
            for body in self.bodies()
            if body.longest == 1
        ]

    def body(self, tokens: int, rows: int, longest: int, skew: float = 1.0) -> BodyShape | None:
        """Returns the smallest shape that holds a step, or None.

        Args:
            skew: see `StepPlan`.
        """
        limits = self._limits
        if rows > limits.lanes or tokens > limits.tokens or not tokens:
            return None
        if longest == 1 and tokens == rows:
            return self._decode(_at_least(self._rows, rows), skew)
        if self._short and longest <= SHORT_ROW and tokens <= self._short[-1]:
            size = _at_least(self._short, tokens)
            if rows <= self._most_rows(size):
                return BodyShape(size, self._most_rows(size), SHORT_ROW)
        size = _at_least(self._mixed, tokens)
        most = self._most_rows(size)
        return BodyShape(size, min(FEW_ROWS, most) if rows <= FEW_ROWS else most, size)

    def head(self, logit_rows: int, level: Level) -> HeadShape | None:
        """Returns the smallest shape that holds a step's logit rows, or None."""
        if logit_rows > self._limits.logit_rows:
            return None
        return HeadShape(_at_least(self._logit_rows, logit_rows), level)

    def few(self, tokens: int) -> BodyShape:
        """Returns the shape of a mixed step of `tokens` tokens in few rows."""
        size = _at_least(self._mixed, tokens)
        return BodyShape(size, min(FEW_ROWS, self._most_rows(size)), size)

    def _decode(self, rows: int, skew: float) -> BodyShape:
        """Returns the shape of decodes of `rows` rows, places of padding included."""
        return BodyShape(rows, rows, 1, even=skew <= self.most_skew.get(rows, 0.0))

    def _most_rows(self, tokens: int) -> int:
        """Returns the most rows of a mixed step, in which at least one row has two tokens."""
        return min(tokens - 1, self._limits.lanes)


class EncoderBuckets(Buckets):
    """The shapes to which steps of whole texts are padded.

    A body is captured for each number of tokens, and for texts of a few lengths, because attention
    launches programs for as many tokens as the longest text may have.
    """

    def bodies(self) -> list[BodyShape]:
        shapes = [
            BodyShape(tokens, self._limits.lanes, longest)
            for tokens in self._mixed
            for longest in self._lengths(tokens)
        ]
        return [*reversed(shapes)]

    def body(self, tokens: int, rows: int, longest: int, skew: float = 1.0) -> BodyShape | None:
        if rows > self._limits.lanes or tokens > self._limits.tokens or not tokens:
            return None
        size = _at_least(self._mixed, tokens)
        return BodyShape(size, self._limits.lanes, _at_least(self._lengths(size), longest))

    def few(self, tokens: int) -> BodyShape:
        size = _at_least(self._mixed, tokens)
        return BodyShape(size, self._limits.lanes, self._lengths(size)[0])

    def _lengths(self, tokens: int) -> list[int]:
        """Returns the longest texts for which a body of `tokens` tokens is captured."""
        return _up_to(min(tokens, self._limits.length), [_SHORT_TEXT, _LONG_TEXT])


class Graphs:
    """Captured programs by shape or name, in one memory pool.

    Each program overwrites the memory of the others in the pool. So values that pass from one
    program to another lie outside it.
    """

    def __init__(
        self, device: torch.device, limits: Limits, buckets: Buckets | None = None
    ) -> None:
        self._device = device
        self._limits = limits
        self._buckets = Buckets(limits) if buckets is None else buckets
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Any, torch.cuda.CUDAGraph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Any) -> bool:
        return key in self._graphs

    def body(self, step: BodyShape, skew: float = 1.0) -> BodyShape | None:
        """Returns the shape of the captured body that a step is padded to, or None.

        Args:
            step: the step's own shape.
            skew: see `StepPlan`.
        """
        shape = self._buckets.body(step.tokens, step.rows, step.longest, skew)
        if shape is not None and step.altered:
            shape = replace(shape, altered=True)
        return shape if shape in self else None

    def head(self, logit_rows: int, level: Level) -> HeadShape | None:
        """Returns the shape of the captured head that a step is padded to, or None."""
        shape = self._buckets.head(logit_rows, level)
        return shape if shape in self else None

    def step(self, body: BodyShape, head: HeadShape) -> StepShape | None:
        """Returns the shape of the captured program of both, or None."""
        shape = StepShape(body, head)
        return shape if shape in self else None

    def capture_steps(self, program: StepProgram, progress: Progress | None = None) -> int:
        """Captures all bodies, heads and hooks' own programs, with the fastest kernels.

        Returns the number of tokens of a full step.
        """
        self._tune(program)
        more = {name: run for hook in program.hooks for name, run in hook.programs().items()}
        self._buckets.most_skew = decodes_most_skew(program, self._limits)
        self.capture(program_works(program, self._buckets, more), progress)
        for hook in program.hooks:
            hook.capture({name: functools.partial(self.replay, name) for name in hook.programs()})

        def seconds(tokens: int) -> float:
            # Summed over ranks, so that all of them replay the same bodies next.
            duration = torch.tensor(self.seconds(self._buckets.few(tokens)), device=self._device)
            return float(sum_over_all_ranks(duration))

        return full_step(seconds, self._limits.tokens)

    def _tune(self, program: StepProgram) -> None:
        """Measures and chooses the fastest tiles of experts, and the size from which on steps are
        computed as halves."""
        # Imported here because the module imports Triton, and `graphs` is imported on CPUs too.
        from quire.runner.expert_tiles import choose_tiles

        choose_tiles(program.model, self._limits.tokens)
        group = program.model.group
        if isinstance(group, HalvesGroup) and group.measured:
            timed = Graphs(self._device, self._limits)
            group.choose(functools.partial(timed.body_seconds, program), self._limits.tokens)
            # Frees the memory of the graphs that were captured to be timed.
            del timed
            torch.cuda.empty_cache()

    def body_seconds(self, program: StepProgram, tokens: int) -> float:
        """Captures the body of a step of few rows, with the present settings, and times it.

        Returns:
            the best of three replays, as the mean over all ranks, in seconds.
        """
        shape = self._buckets.few(tokens)
        key = shape, len(self)
        self.capture({key: functools.partial(_run_body, program, shape)})
        best = min(self.seconds(key) for _ in range(3))
        total = sum_over_all_ranks(torch.tensor(best, device=self._device))
        return float(total) / torch.distributed.get_world_size()

    @torch.inference_mode()
    def capture(
        self, works: Mapping[Any, Callable[[bool], None]], progress: Progress | None = None
    ) -> None:
        """Captures programs by key, in order. The largest comes first, so that others reuse its
        memory.

        Args:
            works: functions that run a program. Their argument says whether one layer of each kind
                is enough: those layers compile the kernels of all layers.
        """
        # The first run compiles kernels, on all cores, and the second run loads them. Neither may
        # happen within a capture.
        with compiling(os.cpu_count() or 1):
            for work in works.values():
                work(True)
        for work in works.values():
            work(True)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        for done, (key, work) in enumerate(works.items()):
            if progress is not None:
                progress(done, len(works))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                # Threads of a process group may query the device meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work(False)
                finally:
                    graph.capture_end()
            self._graphs[key] = graph
        if progress is not None:
            progress(len(works), len(works))
        torch.cuda.synchronize(self._device)

    def replay(self, key: Any) -> None:
        self._graphs[key].replay()

    def seconds(self, key: Any) -> float:
        """Measures how long a replay takes."""
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.replay(key)
        begin.record()
        self.replay(key)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def decodes_most_skew(program: StepProgram, limits: Limits) -> dict[int, float]:
    """Returns the skew up to which decodes are even, by each number of rows for which it
    matters."""
    each = {rows: program.bound.most_skew(rows) for rows in decode_buckets(limits)}
    return {rows: skew for rows, skew in each.items() if skew is not None}


def program_works(
    program: StepProgram, buckets: Buckets, more: Mapping[str, Callable[[], None]]
) -> dict[Any, Callable[[bool], None]]:
    """Returns the programs to capture: bodies, hooks' own programs, heads, whole steps."""
    works: dict[Any, Callable[[bool], None]] = {}
    bodies = buckets.bodies()
    if any(hook.alters for hook in program.hooks):
        bodies = [replace(body, altered=altered) for body in bodies for altered in (True, False)]
    for body in bodies:
        works[body] = functools.partial(_run_body, program, body)
    for name, run in more.items():
        works[name] = functools.partial(_run_other, run)
    for head in buckets.heads() if program.model.gives_logits else ():
        works[head] = functools.partial(_run_head, program, head)
    if program.model.gives_logits:
        for shape in buckets.steps():
            works[shape] = functools.partial(_run_step, program, shape)
    return works


def _run_body(program: StepProgram, shape: BodyShape, shallow: bool) -> None:
    program.body(shape, shallow=shallow)


def _run_head(program: StepProgram, shape: HeadShape, shallow: bool) -> None:
    program.head(shape)


def _run_step(program: StepProgram, shape: StepShape, shallow: bool) -> None:
    program.body(shape.body, shallow=shallow)
    program.head(shape.head)


def _run_other(run: Callable[[], None], shallow: bool) -> None:
    run()
