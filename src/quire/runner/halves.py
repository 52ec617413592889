"""The tokens from which steps are faster as two halves, measured at the start."""

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
"""The fewest tokens that are measured."""
_GAIN = 0.99
"""The share of a whole step's time that one in halves may take: less is noise."""
_REPLAYS = 3


class Measuring(Protocol):
    """Programs that are captured to be timed."""

    def capture(self, works: Mapping[Any, Callable[[bool], None]]) -> None:
        """Captures programs by key, see `Graphs.capture`."""
        ...

    def seconds(self, key: Any) -> float:
        """Returns how long a replay takes."""
        ...


Seconds = Callable[[int, bool], float]
"""The time of a step of so many tokens, as halves or whole."""


def halves_from(seconds: Seconds, most: int) -> int:
    """Returns the tokens from which steps are to be computed as halves, the most or a half of them
    or a fourth and so on: halves are faster there, and at all that are more. `sys.maxsize`: they
    are at none."""
    found, tokens = sys.maxsize, most
    while tokens >= _FEWEST and seconds(tokens, True) < _GAIN * seconds(tokens, False):
        found, tokens = tokens, tokens // 2
    return found


def choose_halves(
    program: StepProgram, graphs: Measuring, shape_of: Callable[[int], BodyShape]
) -> None:
    """Finds it for a program whose group asks for that; all ranks find the same. graphs: of its
    own. shape_of: the shape that a step of so many tokens is padded to."""
    group = program.model.group
    if not (isinstance(group, HalvesGroup) and group.measured):
        return

    def seconds(tokens: int, halves: bool) -> float:
        key = shape_of(tokens), halves
        graphs.capture({key: functools.partial(_run, group, program, *key)})
        best = min(graphs.seconds(key) for _ in range(_REPLAYS))
        # The sum over ranks, so that all of them choose alike.
        taken = sum_over_all_ranks(torch.tensor(best, device=program.model.device))
        mean = float(taken) / torch.distributed.get_world_size()
        how = "in halves" if halves else "whole"
        logger.info("steps of %d tokens %s: %.2f ms", tokens, how, 1e3 * mean)
        return mean

    group.halves_from = halves_from(seconds, len(program.hidden))
    logger.info("async_tp=auto: %s", described(group.halves_from))


def described(tokens: int) -> str:
    """Returns what is said of `HalvesGroup.halves_from`."""
    return "off" if tokens == sys.maxsize else f"steps of at least {tokens} tokens are two halves"


def _run(
    group: HalvesGroup, program: StepProgram, shape: BodyShape, halves: bool, shallow: bool
) -> None:
    group.halves_from = 0 if halves else sys.maxsize
    try:
        program.body(shape, shallow=shallow)
    finally:
        group.halves_from = sys.maxsize
