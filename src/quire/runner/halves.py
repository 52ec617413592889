"""Measures, at the start, from how many tokens on steps are faster as two halves."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from quire.layers.async_tp import HalvesGroup
from quire.parallel.torch_group import sum_over_all_ranks
from quire.runner.program import BodyShape, StepProgram

logger = logging.getLogger("quire.parallel")

_FEWEST = 512
"""Steps with fewer tokens are not measured."""
_GAIN = 0.99
"""A step in halves counts as faster if it takes less than this part of a whole step's time."""
_REPLAYS = 3


class ProgramTimer(Protocol):
    """Captures programs and times them."""

    def capture(self, works: Mapping[Any, Callable[[bool], None]]) -> None:
        """Captures programs by key, see `Graphs.capture`."""
        ...

    def seconds(self, key: Any) -> float:
        """Returns how long a replay takes."""
        ...


Seconds = Callable[[int, bool], float]
"""Returns the seconds of a step, by its number of tokens and whether it runs as halves."""


def halves_from(seconds: Seconds, most: int) -> int:
    """Returns the least number of tokens from which on steps are faster as halves.

    Tries `most` tokens, then half of them, and so on, while halves are faster. Returns
    `sys.maxsize` if they never are.
    """
    least, tokens = sys.maxsize, most
    while tokens >= _FEWEST and seconds(tokens, True) < _GAIN * seconds(tokens, False):
        least, tokens = tokens, tokens // 2
    return least


def choose_halves(
    program: StepProgram, graphs: ProgramTimer, shape_of: Callable[[int], BodyShape]
) -> None:
    """Sets `HalvesGroup.halves_from` if the program's group wants it measured.

    All ranks get the same number.

    Args:
        graphs: captures programs; it must hold no others.
        shape_of: returns the shape to which a step of so many tokens is padded.
    """
    group = program.model.group
    if not (isinstance(group, HalvesGroup) and group.measured):
        return

    def seconds(tokens: int, halves: bool) -> float:
        key = shape_of(tokens), halves
        graphs.capture({key: functools.partial(_run, group, program, *key)})
        best = min(graphs.seconds(key) for _ in range(_REPLAYS))
        # Summed over ranks, so that all of them choose alike.
        total = sum_over_all_ranks(torch.tensor(best, device=program.model.device))
        mean = float(total) / torch.distributed.get_world_size()
        how = "in halves" if halves else "whole"
        logger.info("steps of %d tokens %s: %.2f ms", tokens, how, 1e3 * mean)
        return mean

    group.halves_from = halves_from(seconds, len(program.hidden))
    logger.info("async_tp=auto: %s", described(group.halves_from))


def described(tokens: int) -> str:
    """Returns a description of `HalvesGroup.halves_from`, for people."""
    return "off" if tokens == sys.maxsize else f"steps of at least {tokens} tokens are two halves"


def _run(
    group: HalvesGroup, program: StepProgram, shape: BodyShape, halves: bool, shallow: bool
) -> None:
    group.halves_from = 0 if halves else sys.maxsize
    try:
        program.body(shape, shallow=shallow)
    finally:
        group.halves_from = sys.maxsize
