"""Measures how long steps take, before any request comes: what drafts are weighed against."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from quire.executor import StepSeconds
from quire.runner.hooks.hook import Level
from quire.runner.program import BodyShape, CapturedPrograms, HeadShape, StepProgram

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_CPU_SIZES = (1, 2, 4, 8, 16)
_RUNS, _AT_ONCE = 3, 4


@torch.inference_mode()
def measure_steps(
    program: StepProgram,
    graphs: CapturedPrograms | None,
    others: Mapping[str, Mapping[int, Callable[[], None]]],
) -> StepSeconds:
    """Returns the seconds of decode steps by rows, of verifying steps by tokens, and of `others` by
    name and size.

    The steps have no rows, so attention and what reads its KV take next to nothing: they take as
    long with drafts as without. graphs: replayed where there are some. All stages of a pipeline run
    the same steps; what the last one measures counts.
    """
    state = program.lanes.state
    device, limits = state.device, state.limits
    found: StepSeconds = {"decode": {}, "verify": {}}
    longest = {"decode": 1, "verify": 2}
    largest = min(limits.logit_rows, limits.tokens)
    # A CPU takes longer, and larger sizes are in proportion. All ranks run the same.
    sizes = (*_SIZES, largest) if device.type == "cuda" else _CPU_SIZES
    for size in sorted({min(size, largest) for size in sizes}):
        for kind, most in longest.items():
            if size <= (limits.lanes if kind == "decode" else largest):
                run = _step(program, graphs, size, most)
                found[kind][size] = _seconds(run, device)
    for name, runs in others.items():
        found[name] = {size: _seconds(run, device) for size, run in runs.items()}
    return found


def _step(
    program: StepProgram, graphs: CapturedPrograms | None, size: int, longest: int
) -> Callable[[], None]:
    """Returns what runs a body and a plain head of so many tokens."""
    rows = size if longest == 1 else max(1, min(size // 2, program.lanes.state.limits.lanes))
    heads = program.model.gives_logits
    body = head = None
    if graphs is not None:
        body = graphs.body(BodyShape(size, rows, longest))
        head = graphs.head(size, Level.PLAIN) if heads else None

    def run() -> None:
        # All stages of a pipeline must run the same body, the earlier ones without a head.
        if graphs is None or body is None:
            program.body(BodyShape(size, 0, longest))
        else:
            graphs.replay(body)
        if graphs is not None and head is not None:
            graphs.replay(head)
        elif heads:
            program.head(HeadShape(size, Level.PLAIN))

    return run


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    """Returns the least of some runs, after one to warm up. On a GPU several follow each other at
    once, as steps do."""
    run()
    best, at_once = float("inf"), _AT_ONCE if device.type == "cuda" else 1
    for _ in range(_RUNS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        for _ in range(at_once):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, (time.perf_counter() - begun) / at_once)
    return best
