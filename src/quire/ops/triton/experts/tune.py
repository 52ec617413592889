"""Measures which tiles run a model's experts fastest on this card.

A few plans are timed for each range of tokens: the plans by rules for this range and its
neighbours, then other tiles of each product. They run on the layers' own weights, with random
routes, as replays of a CUDA graph. The graph contains several layers, so that weights are read from
memory instead of L2."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from quire.ops.experts import ExpertWeights, Swiglu
from quire.ops.triton.experts.experts import run_experts, shape_of
from quire.ops.triton.experts.plan import (
    PLANS,
    RANGES,
    AnyTile,
    Entries,
    ExpertsPlan,
    ExpertsShape,
    IntegerTile,
    MmaTile,
    Tile,
    key_of,
    plan_for,
)
from quire.ops.triton.launch import compiling
from quire.ops.triton.products.measure import Measured, graph_us, preferred, search

logger = logging.getLogger("quire.experts")

SECONDS = 8.0
"""Time limit in seconds. Ranges that are not measured by then use the rules. Compilation does not
count."""
_LAYERS = 8
"""Number of layers in a timed graph."""
_FEW = 8
"""Up to this many tokens, a layer takes about 10 µs. With more tokens it takes about 100 µs."""

_SORTED = (
    MmaTile(2, 1, 1, 1, early=True),
    MmaTile(1, 1, 2, 1, early=True),
    MmaTile(2, 1, 2, 1, early=True),
)
_OTHERS: dict[tuple[str, str, type], tuple[AnyTile, ...]] = {
    ("gemv", "up", IntegerTile): (
        IntegerTile(4, 1),
        IntegerTile(4, 2),
        IntegerTile(2, 4),
        IntegerTile(2, 2),
    ),
    ("gemv", "down", IntegerTile): (
        IntegerTile(8, 3),
        IntegerTile(4, 6),
        IntegerTile(16, 1),
        IntegerTile(8, 1),
    ),
    ("gemv", "up", MmaTile): (
        MmaTile(1, 0, 2, 4, early=True),
        MmaTile(1, 0, 4, 1),
        MmaTile(1, 0, 4, 2),
    ),
    ("gemv", "down", MmaTile): (MmaTile(1, 0, 8, 3), MmaTile(1, 0, 8, 2), MmaTile(1, 0, 16, 3)),
    ("gemv", "up", Tile): (Tile(1, 4, 512, 4, 3), Tile(1, 8, 512, 4, 3), Tile(1, 16, 256, 4, 3)),
    ("gemv", "down", Tile): (Tile(1, 4, 256, 4), Tile(1, 4, 512, 4), Tile(1, 4, 1024, 4)),
    ("grouped", "up", MmaTile): _SORTED,
    ("grouped", "down", MmaTile): _SORTED,
}
"""Tiles to try in addition to those of the rules, by kernel and product. They are few, because each
must be compiled."""


Found = list[Measured[ExpertsPlan]]


class TunedLayer(NamedTuple):
    """The experts of a layer on this rank.

    Attributes:
        first: index of the rank's first expert among the experts of all ranks.
    """

    up: ExpertWeights
    down: ExpertWeights
    act: Swiglu
    top_k: int
    first: int
    dtype: torch.dtype


def whole_plans(shape: ExpertsShape) -> list[ExpertsPlan]:
    """Returns plans by rules: first the plan for the shape's range, then the plans for two ranges
    on either side, then the plan without `integer`."""
    at = RANGES.index(shape.tokens)
    beside = [shape.tokens, *RANGES[max(0, at - 2) : at + 3]]
    plans = [plan_for(shape._replace(tokens=tokens)) for tokens in beside]
    if shape.counts:
        plans.append(plan_for(shape._replace(counts=False)))
    return list(dict.fromkeys(plan for plan in plans if plan.expand == shape.expand))


def other_tiles(plan: ExpertsPlan, product: Literal["up", "down"]) -> list[ExpertsPlan]:
    """Returns copies of a plan with other tiles for one of its products."""
    own = getattr(plan, product)
    tiles = _OTHERS.get((plan.kernel, product, type(own)), ())
    others = [tile for tile in tiles if tile != own]
    if product == "up":
        return [replace(plan, up=tile) for tile in others]
    return [replace(plan, down=tile) for tile in others]


def all_plans(shape: ExpertsShape) -> Iterator[ExpertsPlan]:
    """Yields plans that contain every tile that `best_plan` may time, but not all combinations."""
    for plan in whole_plans(shape):
        yield plan
        yield from other_tiles(plan, "up")
        yield from other_tiles(plan, "down")


def best_plan(shape: ExpertsShape, us_of: Callable[[ExpertsPlan], float]) -> ExpertsPlan:
    """Returns the fastest plan for a shape.

    Args:
        us_of: returns the time of a plan in µs, infinite for a plan that fails.
    """
    first, *beside = whole_plans(shape)

    def others(product: Literal["up", "down"]) -> Callable[[Found], list[ExpertsPlan]]:
        return lambda found: other_tiles((preferred(found) or found[0]).plan, product)

    stages = (lambda found: beside, others("up"), others("down"))
    found = search(first, stages, lambda plan: Measured(plan, us_of(plan)))
    return (preferred(found) or found[0]).plan


class ExpertsTimer:
    """Times plans on layers of one shape of weights, which lie on a GPU."""

    def __init__(self, layers: Sequence[TunedLayer]) -> None:
        self._layers = layers[:: max(1, len(layers) // _LAYERS)][:_LAYERS]
        self._device = layers[0].up.weight.values.device
        # Inputs are cached for the last number of tokens, because all its plans use the same
        # inputs.
        self._tokens = 0
        self._inputs: list[tuple[Tensor, Tensor, Tensor]] = []

    def shape(self, tokens: int) -> ExpertsShape:
        """Returns the layer's shape for a number of tokens."""
        layer = self._layers[0]
        x, ids, _ = self._inputs_of(tokens)[0]
        return shape_of(x, ids, layer.up, layer.down)

    def calls(self, plan: ExpertsPlan, tokens: int) -> list[Callable[[], object]]:
        """Returns functions that run a plan, one for each layer."""
        return [
            functools.partial(
                run_experts, plan, *inputs, each.up, each.down, each.act, residual=inputs[0]
            )
            for each, inputs in zip(self._layers, self._inputs_of(tokens), strict=True)
        ]

    def us(self, plan: ExpertsPlan, tokens: int) -> float:
        """Returns the time of a layer in µs, infinite for a plan that fails."""
        try:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            guess = 10.0 if tokens <= _FEW else 100.0
            return graph_us(self.calls(plan, tokens), guess, self._stream)
        except Exception as error:  # A compiler or driver may raise anything for a bad tile.
            logger.debug("%s for %d tokens: %s: %s", plan, tokens, type(error).__name__, error)
            return math.inf

    @functools.cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def _inputs_of(self, tokens: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Returns x, ids and weights of random routes, for each layer."""
        if tokens != self._tokens:
            generator = torch.Generator(self._device).manual_seed(tokens)
            self._inputs = [self._drawn(layer, tokens, generator) for layer in self._layers]
            self._tokens = tokens
        return self._inputs

    def _drawn(
        self, layer: TunedLayer, tokens: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        options: Any = {"device": self._device, "generator": generator}
        x = torch.randn(tokens, layer.up.weight.inputs, **options).to(layer.dtype)
        weights, ids = torch.rand(tokens, layer.up.total, **options).topk(layer.top_k, 1)
        ids -= layer.first
        ids.masked_fill_((ids < 0) | (ids >= layer.up.experts), -1)
        return x, ids.int(), weights / layer.top_k


def known_or_measured(layers: Sequence[TunedLayer], most: int) -> Entries:
    """Returns plans for the layers and up to `most` tokens.

    They are read from the cache directory. Missing ones are measured and stored there."""
    card = torch.cuda.get_device_name(layers[0].up.weight.values.device)
    known = PLANS.entries(card)
    found, keys = tune(layers, most, known)
    if found:
        try:
            PLANS.keep(card, found)
        except OSError as error:
            logger.warning("experts: the measured plans could not be stored: %s", error)
    return {key: plan for key, plan in {**known, **found}.items() if key in keys}


def _compile(wanted: Sequence[tuple[ExpertsTimer, ExpertsShape]]) -> None:
    """Compiles all kernels that may be timed, on all cores."""
    with compiling(os.cpu_count() or 1):
        for timer, shape in wanted:
            for plan in all_plans(shape):
                with contextlib.suppress(Exception):  # The plan fails again when it is timed.
                    timer.calls(plan, shape.tokens)[0]()


def tune(layers: Sequence[TunedLayer], most: int, known: Entries) -> tuple[Entries, set[str]]:
    """Measures the layers' unknown shapes of up to `most` tokens.

    Returns the measured plans and the keys of all shapes. When `SECONDS` have passed, the remaining
    shapes are skipped."""
    groups: dict[ExpertsShape, list[TunedLayer]] = {}
    for layer in layers:
        groups.setdefault(ExpertsTimer([layer]).shape(1), []).append(layer)
    sizes = [tokens for tokens in RANGES if tokens <= most]
    shapes = [
        (timer, timer.shape(tokens))
        for timer in map(ExpertsTimer, groups.values())
        for tokens in sizes
    ]
    keys = {key_of(shape) for _, shape in shapes}
    wanted = [(timer, shape) for timer, shape in shapes if key_of(shape) not in known]
    if not wanted:
        return {}, keys
    began = time.perf_counter()
    _compile(wanted)
    compiled = time.perf_counter()
    found: Entries = {}
    for timer, shape in wanted:
        if time.perf_counter() > compiled + SECONDS:
            break
        plan = best_plan(shape, functools.partial(timer.us, tokens=shape.tokens))
        found[key_of(shape)] = plan
        if plan != plan_for(shape):
            logger.info("experts, %s: %s", key_of(shape), plan)
    logger.info(
        "experts: %d of %d ranges of tokens measured; compiled for %.1f s, measured for %.1f s",
        len(found), len(wanted), compiled - began, time.perf_counter() - compiled,
    )  # fmt: skip
    # The memory of captures can be freed after their graphs were deleted.
    torch.cuda.empty_cache()
    return found, keys
