"""The arguments and the plan of a linear layer: data that kernels and planner share."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import triton
from torch import Tensor

from quire.ops.arguments import Activation, RmsScale
from quire.ops.triton.launch import launch
from quire.ops.weight import Weight, WeightFormat

GATED = {"silu_and_mul": "silu", "gelu_tanh_and_mul": "gelu_tanh"}
"""Activations of a layer whose weight stacks gate rows and up rows: act(gate) * up."""
PLAIN = ("gelu", "gelu_tanh")
"""Activations of each output by itself."""

CHUNK_WORDS = 16
"""Words of 32 bits of a weight row that a warp of `mma_gemv` takes at a time."""
MMA_ROWS = 8
"""The most rows of x that `mma_gemv` takes with weights of few bits."""
MMA_PLAIN_ROWS = 16
"""The most with weights of 16 bits."""

INTEGER_ROWS = 4
"""The most rows of x that `integer_gemv` takes."""
INTEGER_INPUTS = 128
"""Inputs that `integer_gemv` rounds relative to their largest."""
INTEGER_BYTES = 48 << 10
"""Bytes of shared memory that a program of it has."""

NormMode = Literal["none", "exact", "late", "separate"]


@dataclass(frozen=True, slots=True)
class LinearArgs:
    """A layer y [M, N] = act(norm(x) @ weight^T + bias) + residual.

    Sums are fp32 and rounded once, at the end. The kernel reads weight, scales and bias before the
    preceding kernel on the stream has finished (programmatic dependent launch). So that kernel must
    not write them.

    Attributes:
        x: [M, K], bf16, fp16 or fp32, last axis contiguous.
        weight: [N, K], of x's dtype unless it has scales, last axis of its values contiguous; with
            a gated activation [2 N, K].
        bias: one number for each weight row.
        norm: RMSNorm applied to x.
        residual: [M, N], in x's dtype.
        act: activation of the product.
        apart: a gated layer leaves the activation out; y is then gate and up, [M, 2 N].
    """

    x: Tensor
    weight: Weight
    bias: Tensor | None = None
    norm: RmsScale | None = None
    residual: Tensor | None = None
    act: Activation | None = None
    apart: bool = False

    @property
    def gated(self) -> bool:
        return self.act in GATED

    @property
    def act_name(self) -> str:
        return GATED.get(self.act, self.act) if self.act else ""

    @property
    def n(self) -> int:
        """Outputs per row."""
        return self.weight.outputs // (2 if self.gated else 1)

    @property
    def k(self) -> int:
        return self.weight.inputs


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """One way to run a linear layer.

    Attributes:
        kernel: "gemv", "mma" (GEMV on tensor cores, for few bits or rows), "integer" (GEMV in
            integers, for 4 or 8 bits), "skinny", or "torch" (cuBLAS, with the other steps as
            separate kernels).
        bm, bn, bk: tile in rows of x, outputs and K; gated tiles read 2 bn weight rows. bm is the
            padded M of a GEMV. "mma" and "integer" have their own tiles.
        warps: warps of a program.
        stages: tiles in flight; for "mma" and "integer", chunks that each warp has in flight.
        split_k: programs that share one tile's K; the last to arrive adds their sums in fixed
            order.
        swap: weights are the left operand, and fill the 64 rows of a Hopper warpgroup.
        norm: "exact" computes each row's mean square before the product. "late" scales the sums
            afterwards: one pass over x, and one rounding less. "separate" leaves the norm to its
            own kernel.
        prefetch: bytes of each weight row to prefetch into L2 before waiting for the predecessor.
        eager: let the successor start before that wait, not after it, so that it prefetches
            earlier.
        masked: mask a tile's rows past the last, instead of reading the last row again.
        programs: for "integer", programs that share the tiles; 0: one program a tile.
    """

    kernel: Literal["gemv", "mma", "integer", "skinny", "torch"]
    bm: int = 1
    bn: int = 1
    bk: int = 1
    warps: int = 4
    stages: int = 1
    split_k: int = 1
    swap: bool = False
    norm: NormMode = "none"
    prefetch: int = 0
    eager: bool = True
    masked: bool = False
    programs: int = 0

    def as_json(self) -> dict[str, Any]:
        """Returns the fields that differ from the defaults."""
        default = {
            "warps": 4,
            "stages": 1,
            "split_k": 1,
            "swap": False,
            "prefetch": 0,
            "eager": True,
            "masked": False,
            "programs": 0,
        }
        if self.kernel == "torch":
            return {"kernel": "torch"}
        return {
            key: v for key, v in asdict(self).items() if key not in default or v != default[key]
        }


TORCH = GemmPlan("torch", norm="separate")


class Shape(NamedTuple):
    """The shape that the choice of a plan depends on.

    Attributes:
        m: rows of x.
        n: outputs.
        k: inputs.
        dtype: dtype of x.
        norm: x is normed first.
        gated: the activation is gated.
        format: format of a weight with scales; None for a weight stored in `dtype`.
        aligned: rows of x and of the weight begin at multiples of 16 bytes.
    """

    m: int
    n: int
    k: int
    dtype: torch.dtype
    norm: bool = False
    gated: bool = False
    format: WeightFormat | None = None
    aligned: bool = True

    @property
    def weight_bytes(self) -> int:
        outputs = self.n * (2 if self.gated else 1)
        return (self.format or WeightFormat(self.dtype)).weight_bytes(outputs, self.k)


def shape_of(args: LinearArgs) -> Shape:
    x, weight = args.x, args.weight
    return Shape(
        x.shape[0], args.n, args.k, x.dtype, args.norm is not None, args.gated,
        None if weight.scales is None else replace(weight.format, inputs="none"),
        _aligned(x) and _aligned(weight.values),
    )  # fmt: skip


def _aligned(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0


def stored_bits(form: WeightFormat | None) -> int:
    """Returns the bits of a stored value that `mma_gemv` takes; 16 for a format of None."""
    return 16 if form is None or form.scales is None else form.bits or 8


def chunk_inputs(bits: int) -> int:
    """Returns the inputs that `CHUNK_WORDS` hold."""
    return CHUNK_WORDS * 32 // bits


def multiplies(shape: Shape) -> bool:
    """Whether `mma_gemv` takes a shape, on cards that have its instruction."""
    form, inputs = shape.format, chunk_inputs(stored_bits(shape.format))
    most = MMA_PLAIN_ROWS if form is None else MMA_ROWS
    if shape.m > most or not shape.aligned or shape.k % inputs:
        return False
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return False
    if form is None:
        return True
    if form.code != "integer" or form.ordered or form.bits not in (0, 4):
        return False
    return form.group % inputs == 0 and not (form.zeros and not (form.bits and form.group))


def counts(shape: Shape) -> bool:
    """Whether `integer_gemv` takes a shape, on cards of sm_86 and newer."""
    form = shape.format
    if form is None or not multiplies(shape) or shape.dtype != torch.bfloat16:
        return False
    if form.bits == 4:
        fits = form.group == INTEGER_INPUTS and form.scales in (torch.float16, torch.bfloat16)
    else:
        fits = form.values == torch.int8 and not form.group
    return fits and shape.m <= INTEGER_ROWS and shape.k % INTEGER_INPUTS == 0


def integer_segments(k: int, plan: GemmPlan) -> int:
    """Returns the parts of K inputs that a program of "integer" takes one after the other."""
    return triton.cdiv(k, plan.warps * plan.stages * INTEGER_INPUTS)


def integer_resident(shape: Shape, warps: int, count: int) -> int:
    """Returns how many programs of "integer" fit into a multiprocessor by their registers.

    `count` is the number of chunks of each warp. The result is 0 where a thread has no room for
    them."""
    held = count * (8 if shape.format and shape.format.bits == 4 else 16)
    return 0 if held > (64 if warps == 16 else 104) else 65536 // (32 * warps * (held + 64))


def integer_bytes(shape: Shape, plan: GemmPlan) -> int:
    """Returns the bytes of shared memory of a program of "integer": bytes of inputs, sums of warps
    and, between segments, of tiles."""
    rows = triton.next_power_of_2(shape.m)
    size = plan.warps * (plan.stages * rows * 264 + 640)
    if integer_segments(shape.k, plan) > 1:
        tiles = triton.cdiv(shape.n, 8 if shape.gated else 16)
        size += triton.cdiv(tiles, plan.programs or tiles) * plan.warps * 256
    return size


def norms_late(shape: Shape) -> bool:
    """Whether `mma_gemv` applies a norm. With few bits each program reads all of x once more for
    it; and an unscaled x * weight may exceed fp16."""
    return shape.dtype == torch.bfloat16 and (shape.m == 1 or shape.format is None)


def streams(weight: Weight) -> bool:
    """Whether our kernels load tiles of a weight; others are dequantized as a whole."""
    format = weight.format
    if format.scales is None:
        return True
    if format.code != "integer" or format.ordered or weight.first:
        return False
    if format.group and (format.group < 16 or format.group & (format.group - 1)):
        return False
    values = weight.values
    if format.bits:
        # Kernels load words of 32 bits.
        words = weight.inputs % 8 == 0 and values.stride(0) % 4 == 0
        return words and values.storage_offset() % 4 == 0
    return format.values in (torch.int8, torch.float8_e4m3fn)


class Launch(NamedTuple):
    """A kernel launch that is yet to happen."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> None:
        launch(self.kernel, self.grid)(*self.args, **self.options)
