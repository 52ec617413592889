"""Measures which kernel and tile runs each linear layer fastest on this card.

Every candidate is first compared with a float64 result. Then it is timed in replays of a CUDA graph
with enough copies of the weight to exceed L2. Each launch waits for the one before, like the layers
of a model. cuBLAS, with the other steps as separate kernels, is one of the candidates."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Protocol, TypeVar

import torch
import triton
from torch import Tensor

from quire.ops.arguments import RmsScale
from quire.ops.reference.quantized import LARGEST
from quire.ops.triton import activation, norm
from quire.ops.triton.launch import compiling, traits
from quire.ops.triton.products import small
from quire.ops.triton.products.measure import Measured, by_time, graph_us, search
from quire.ops.triton.products.plan import (
    INTEGER_BYTES,
    INTEGER_INPUTS,
    TORCH,
    GemmPlan,
    Launch,
    LinearArgs,
    NormMode,
    Shape,
    chunk_inputs,
    counts,
    integer_bytes,
    integer_resident,
    multiplies,
    norms_late,
    stored_bits,
)
from quire.ops.triton.products.quantized_tiles import dequantize
from quire.ops.triton.products.skinny import Workspace
from quire.ops.triton.products.table import bucket, heuristic, key_of
from quire.ops.weight import Weight

logger = logging.getLogger("quire.tables")
T = TypeVar("T")

COLD_BYTES = 256 << 20
"""Bytes of weights that a timed graph reads before it reads a weight again. The L2 of an H200 has
60 MB."""
TOLERANCE = 2e-2
"""Limit for the relative error of a bf16 result against float64."""
_MOST_INPUTS = 1 << 16
"""The most inputs of a layer with a norm."""
_REFERENCE_BYTES = 64 << 20
"""Bytes of the weight rows, in float64, that are multiplied at a time for the comparison."""

# Each entry has weight rows of a tile, BK, warps and stages. A tile that spans K is loaded
# completely before the wait for the predecessor.
_GEMV_LOOPS = ((4, 1024, 4, 1), (2, 2048, 8, 1), (8, 1024, 4, 1), (4, 1024, 4, 4))
_GEMV_FEW_ROWS = ((2, 1024, 4, 1), (4, 512, 4, 1))
# By padded M, entries of weight rows of a tile, BK, warps, stages and swap.
_SKINNY = {
    16: (
        (16, 256, 4, 4, False),
        (32, 128, 4, 5, False),
        (64, 128, 4, 4, False),
        (64, 64, 4, 5, True),
        (64, 128, 4, 4, True),
        (64, 128, 4, 5, True),
        (128, 64, 4, 6, True),
        (128, 128, 8, 4, True),
    ),
    32: ((32, 128, 4, 4, False), (64, 128, 4, 3, False), (64, 64, 4, 5, True)),
    64: (
        (32, 128, 4, 4, False),
        (64, 64, 4, 5, False),
        (128, 64, 4, 4, False),
        (128, 64, 8, 4, True),
    ),
    128: ((64, 64, 4, 4, False), (128, 64, 8, 3, False)),
}


def torch_linear(args: LinearArgs) -> Tensor:
    """Computes the layer by cuBLAS, with separate kernels for norm, activation and residual."""
    x = args.x
    if args.norm is not None:
        x = norm.rms_norm(x, args.norm.weight, args.norm.eps)
    values = args.weight.values
    if args.weight.scales is not None:
        values = dequantize(args.weight, x.dtype)
    y = torch.nn.functional.linear(x, values, args.bias)
    if args.gated:
        y = activation.run(y, "silu_and_mul")
    return y if args.residual is None else y + args.residual


def _gemv_candidates(shape: Shape) -> Iterator[GemmPlan]:
    gate = 2 if shape.gated else 1
    whole = triton.next_power_of_2(shape.k)
    tiles = list(_GEMV_LOOPS if shape.m == 1 else _GEMV_FEW_ROWS)
    if whole <= 4096:
        warps = max(1, min(whole // 512, 8))
        tiles += [(rows, whole, warps, 1) for rows in ((2, 4, 8) if shape.m == 1 else (2,))]
        if shape.m == 1 and whole <= 2048:
            tiles.append((4, whole, warps * 2, 1))
    for rows, bk, warps, stages in dict.fromkeys(tiles):
        if rows >= gate and (bk < whole or bk == whole):
            yield GemmPlan(
                "gemv", bm=triton.next_power_of_2(shape.m), bn=rows // gate, bk=bk, warps=warps,
                stages=stages, norm="exact" if shape.norm else "none",
            )  # fmt: skip


def _skinny_candidates(shape: Shape, sms: int) -> Iterator[GemmPlan]:
    gate = 2 if shape.gated else 1
    bm = min(128, max(16, triton.next_power_of_2(shape.m)))
    for rows, bk, warps, stages, swap in _SKINNY[bm]:
        tiles = triton.cdiv(shape.n * gate, rows) * triton.cdiv(shape.m, bm)
        splits = {1}
        for wave in (1, 2):
            split = 2 ** round(math.log2(max(1.0, wave * sms / tiles)))
            splits.add(min(split, 8, 2 ** int(math.log2(max(1, shape.k // (2 * bk))))))
        for split in sorted(splits)[-2:]:
            yield GemmPlan(
                "skinny", bm=bm, bn=rows // gate, bk=bk, warps=warps, stages=stages, swap=swap,
                split_k=split, norm="separate" if shape.norm else "none",
            )  # fmt: skip


def _mma_candidates(shape: Shape) -> Iterator[GemmPlan]:
    inputs = chunk_inputs(stored_bits(shape.format))
    chunks = shape.k // inputs
    for warps, under_way in itertools.product((2, 4, 8, 16), (1, 2, 3, 4, 5, 6, 7, 8)):
        if shape.format is None and not 16 <= warps * under_way <= 128:
            continue
        if chunks % (warps * under_way) == 0:
            yield GemmPlan(
                "mma", bm=8 if shape.m <= 8 else 16, bn=8 if shape.gated else 16, bk=inputs,
                warps=warps, stages=under_way, norm="separate" if shape.norm else "none",
            )  # fmt: skip


def _integer_candidates(shape: Shape, sms: int) -> Iterator[GemmPlan]:
    """Yields plans in which warps hold a row's words in registers and share its chunks evenly.

    Plans have several segments only for rows that do not fit into registers."""
    chunks, outputs = shape.k // INTEGER_INPUTS, 8 if shape.gated else 16
    tiles, fewest = triton.cdiv(shape.n, outputs), 0
    for segments, warps in itertools.product((1, 2, 3, 4, 5), (1, 2, 4, 8, 16)):
        count = triton.cdiv(chunks, warps * segments)
        missing = warps * segments * count - chunks
        resident = integer_resident(shape, warps, count)
        if 6 * missing > chunks or not resident or fewest == 1 < segments:
            continue
        fewest = fewest or segments
        counts_of = [0]
        for programs in (sms * each for each in range(1, min(4, resident) + 1)):
            if programs < tiles:
                turns = triton.cdiv(tiles, programs)
                counts_of += [programs] + [triton.cdiv(tiles, turns)] * (turns < 5)
        for programs in dict.fromkeys(counts_of):
            plan = GemmPlan(
                "integer", bm=4, bn=outputs, bk=INTEGER_INPUTS, warps=warps, stages=count,
                programs=programs, norm="separate" if shape.norm else "none",
            )  # fmt: skip
            if integer_bytes(shape, plan) <= INTEGER_BYTES:
                yield plan


def candidates(shape: Shape, sms: int) -> list[GemmPlan]:
    """Returns plans with the tiles to try. `refinements` varies their norm and prefetch."""
    plans = list(_gemv_candidates(shape)) if shape.m <= 4 else []
    if multiplies(shape):
        plans += _mma_candidates(shape)
    if counts(shape):
        plans += _integer_candidates(shape, sms)
    if shape.m >= 2:
        plans += _skinny_candidates(shape, sms)
    return plans


def refinements(plan: GemmPlan, shape: Shape, *, norms: bool) -> list[GemmPlan]:
    """Returns copies of a fast plan with other ways to apply the norm (`norms`), or with other
    prefetch depths."""
    if plan.kernel in ("mma", "integer"):
        late = norms and shape.norm and norms_late(shape) and plan.norm != "late"
        return [replace(plan, norm="late")] if late else []
    if norms:
        if not shape.norm:
            return []
        modes: list[NormMode] = [] if plan.split_k > 1 else ["late"]
        if plan.bm <= 16:  # With more rows, reading x twice in each program takes too long.
            modes.append("exact")
        if plan.kernel == "skinny":
            modes.append("separate")
        return [replace(plan, norm=mode) for mode in modes if mode != plan.norm]
    if plan.kernel == "gemv" and shape.k <= plan.bk:
        return []
    return [replace(plan, prefetch=depth) for depth in (1024, 8192)]


class Turn(Protocol):
    """Runs a piece of the device's work when its turn comes, and returns its result."""

    def __call__(self, work: Callable[[], T], /) -> T: ...


def at_once(work: Callable[[], T], /) -> T:
    """Runs the work immediately."""
    return work()


class Tuner:
    """Times plans on one device. All shapes share one pool of random weights.

    Args:
        dtype: dtype of x.
        pool_bytes: size of the pool.
        turn: runs each piece of work on the device, which takes a few milliseconds.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype = torch.bfloat16, pool_bytes: int = 3 << 30,
        turn: Turn = at_once,
    ) -> None:  # fmt: skip
        self.device = device
        self.dtype = dtype
        self.sms = traits(device).num_sms
        self._turn = turn
        self.stream = torch.cuda.Stream(device)
        self.workspace = Workspace.allocate(device)
        self._pool = torch.empty(pool_bytes // dtype.itemsize, dtype=dtype, device=device)
        self._noise = torch.empty(512 * 16384, dtype=dtype, device=device)
        turn(self._draw)
        self._filled: dict[tuple[int, int, torch.dtype, float], Tensor] = {}

    def _draw(self) -> None:
        self._pool.normal_(0.0, 0.03)
        self._noise.normal_()
        self._gains = self._noise[-_MOST_INPUTS:].abs()

    def layer(self, shape: Shape, copy: int = 0) -> LinearArgs:
        """Returns a layer of this shape with the pool's `copy`-th weight.

        A layer without a norm and a gate has a residual, like o and down projections. A layer as
        large as a vocabulary has none."""
        weight = self._weight(shape, copy)
        x = self._noise[: shape.m * shape.k].view(shape.m, shape.k)
        gain = self._gains[: shape.k]
        plain = not (shape.norm or shape.gated or shape.n > 4 * shape.k)
        residual = self._noise[: shape.m * shape.n].view(shape.m, shape.n) if plain else None
        return LinearArgs(
            x=x, weight=weight, norm=RmsScale(gain, 1e-6) if shape.norm else None,
            residual=residual, act="silu_and_mul" if shape.gated else None,
        )  # fmt: skip

    def _weight(self, shape: Shape, copy: int) -> Weight:
        """Returns the pool's `copy`-th weight of a shape. Quantized values are random, and all
        scales are equal."""
        rows, form = shape.n * (2 if shape.gated else 1), shape.format
        if form is None:
            size = rows * shape.k
            return Weight.plain(self._pool[copy * size : (copy + 1) * size].view(rows, shape.k))
        size = rows * shape.k // form.packed
        values = self._bytes[copy * size : (copy + 1) * size].view(form.values).view(rows, -1)
        groups = -(-shape.k // form.group) if form.group else 1
        scales = zeros = None
        if form.scales is not None:
            top = 16 if form.bits else LARGEST[form.values]
            scales = self._full(rows, groups, form.scales, 0.1 / top, copy)
        if form.zeros:
            zeros = self._full(rows, groups, torch.int8, form.zero, copy)
        return Weight(form, values, scales, zeros)

    def _full(
        self, rows: int, groups: int, dtype: torch.dtype, value: float, copy: int
    ) -> Tensor:  # fmt: skip
        """Returns a matrix with one value everywhere. Copy 0 is cached."""
        key = rows, groups, dtype, value
        full = functools.partial(torch.full, key[:2], value, dtype=dtype, device=self.device)
        if copy:
            return full()
        if key not in self._filled:
            self._filled[key] = self._turn(full)
        return self._filled[key]

    @functools.cached_property
    def _bytes(self) -> Tensor:
        """Random bytes for stored values. As 8-bit floats none of them is NaN."""
        values = torch.empty(self._pool.nbytes, dtype=torch.uint8, device=self.device)
        return self._turn(lambda: values.random_(0, 120))

    def copies(self, shape: Shape) -> int:
        wanted = max(2, -(-COLD_BYTES // shape.weight_bytes))
        return max(
            1, min(wanted, 64, self._pool.numel() * self.dtype.itemsize // shape.weight_bytes)
        )

    def call(self, args: LinearArgs, plan: GemmPlan, out: Tensor) -> Tensor:
        """Runs a plan of any kind, including those with a separate norm or cuBLAS."""
        if plan.kernel == "torch":
            return torch_linear(args)
        if plan.norm == "separate" and args.norm is not None:
            x = norm.rms_norm(args.x, args.norm.weight, args.norm.eps)
            args = replace(args, x=x, norm=None)
        return small.run(args, plan, out=out, workspace=self.workspace)

    def launch(self, shape: Shape, plan: GemmPlan) -> Launch:
        """Returns the launch to compile for a plan of one of this package's kernels."""
        args = self.layer(shape)
        if plan.norm == "separate":
            args = replace(args, norm=None)
        out = torch.empty(shape.m, shape.n, dtype=shape.dtype, device=self.device)
        return small.prepare(args, plan, out, workspace=self.workspace)

    def plans(self, shape: Shape) -> list[GemmPlan]:
        """Returns the plan by rules for a shape, then all candidates."""
        rules = heuristic(shape, traits(self.device))
        return list(dict.fromkeys([rules, *candidates(shape, self.sms)]))

    def compile(self, shapes: Iterable[Shape], workers: int) -> None:
        """Compiles every plan that tuning these shapes may run, on `workers` threads."""
        with compiling(workers):
            for shape in shapes:
                for plan in self.plans(shape):
                    for variant in (plan, *refinements(plan, shape, norms=True)):
                        self._compile(shape, variant)

    def _compile(self, shape: Shape, plan: GemmPlan) -> None:
        if plan.kernel != "torch":
            with contextlib.suppress(Exception):  # The plan fails again when it is timed.
                self.launch(shape, plan).run()

    def reference(self, shape: Shape) -> Tensor:
        """Returns the layer's result with copy 0 of its weight, summed in float64, as fp32."""
        args = self.layer(shape)
        x = args.x.double()
        if args.norm is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + args.norm.eps)
            x = x * args.norm.weight.double()
        rows = max(1, _REFERENCE_BYTES // (8 * shape.k))
        parts = [
            self._turn(functools.partial(_product, x, args.weight, first, rows))
            for first in range(0, args.weight.outputs, rows)
        ]
        y = torch.cat(parts, 1)
        if args.gated:
            gate, up = y.chunk(2, -1)
            y = torch.nn.functional.silu(gate) * up
        return y if args.residual is None else y + args.residual.float()

    def measure(self, shape: Shape, plan: GemmPlan, expected: Tensor) -> Measured[GemmPlan]:
        """Compares a plan's result with `expected`, then times it. Catches all failures."""
        with compiling(1):
            self._compile(shape, plan)
        return self._turn(lambda: self._measured(shape, plan, expected))

    def _measured(self, shape: Shape, plan: GemmPlan, expected: Tensor) -> Measured[GemmPlan]:
        out = torch.full_like(expected, math.nan, dtype=shape.dtype)
        try:
            got = self.call(self.layer(shape), plan, out).float()
            error = float((got - expected).norm() / expected.norm())
            if not error < TOLERANCE:
                return Measured(plan, math.inf, f"relative error {error:.2e}")
            layers = [self.layer(shape, copy) for copy in range(self.copies(shape))]
            calls = [lambda args=args: self.call(args, plan, out) for args in layers]
            guess = shape.weight_bytes / 3.5e6 + 3.0
            return Measured(plan, graph_us(calls, guess, self.stream))
        except Exception as error:  # A compiler or driver may raise anything for a bad tile.
            return Measured(plan, math.inf, f"{type(error).__name__}: {str(error)[:120]}")

    def tune_shape(self, shape: Shape) -> list[Measured[GemmPlan]]:
        """Returns the measurements of every plan tried for a shape: the plan by rules first, then
        the others by time."""
        expected = self.reference(shape)
        rules, *others = self.plans(shape)

        def ours(found: list[Measured[GemmPlan]]) -> list[GemmPlan]:
            plans = [each.plan for each in by_time(found) if not each.error]
            return [plan for plan in plans if plan.kernel != "torch"]

        def with_norms(found: list[Measured[GemmPlan]]) -> Iterator[GemmPlan]:
            for plan in ours(found)[:2]:
                yield from refinements(plan, shape, norms=True)

        def with_prefetch(found: list[Measured[GemmPlan]]) -> Iterator[GemmPlan]:
            for plan in ours(found)[:1]:
                yield from refinements(plan, shape, norms=False)

        return search(
            rules, (lambda found: [*others, TORCH], with_norms, with_prefetch),
            lambda plan: self.measure(shape, plan, expected),
        )  # fmt: skip


def _product(x: Tensor, weight: Weight, first: int, rows: int) -> Tensor:
    """Returns x, float64, times `rows` weight rows from `first` on, rounded to fp32."""
    part = weight.rows(first, min(first + rows, weight.outputs))
    wide = part.values if part.scales is None else dequantize(part, torch.float32)
    return (x @ wide.double().T).float()


def tune(
    tuner: Tuner, shapes: Iterable[Shape], workers: int
) -> Iterator[tuple[Shape, list[Measured[GemmPlan]]]]:
    """Yields each shape once with its measurements (see `Tuner.tune_shape`), in order of rows.

    The kernels for equal numbers of rows are compiled first, on `workers` threads. A shape that
    fails is logged and skipped."""
    wanted = {key_of(shape): shape for shape in shapes if bucket(shape.m)}
    by_rows = sorted(wanted.values(), key=lambda shape: shape.m)
    for _, group in itertools.groupby(by_rows, key=lambda shape: shape.m):
        own = list(group)
        tuner.compile(own, workers)
        for shape in own:
            try:
                found = tuner.tune_shape(shape)
            except Exception as error:  # For instance, the shape may not fit into memory.
                logger.warning("%s: %s: %s", key_of(shape), type(error).__name__, error)
                continue
            yield shape, found
