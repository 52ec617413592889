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

GATED = {"silu_and_mul": "silu", "gelu_tanh_and_mul": "gelu_tanh", "gelu_and_mul": "gelu"}
"""Activations of a layer whose weight stacks gate rows and up rows: act(gate) * up."""
PLAIN = ("gelu", "gelu_tanh")
"""Activations that apply to each output by itself."""

CHUNK_WORDS = 16
"""Words of 32 bits of a weight row in a chunk of `mma_gemv`."""
MMA_ROWS = 8
"""The most rows of x that `mma_gemv` supports with weights of few bits."""
MMA_PLAIN_ROWS = 16
"""The most rows of x that `mma_gemv` supports with weights of 16 bits."""

INTEGER_ROWS = 4
"""The most rows of x that `integer_gemv` supports."""
INTEGER_INPUTS = 128
"""Inputs of a group, which `integer_gemv` rounds relative to the largest of them."""
INTEGER_BYTES = 48 << 10
"""Bytes of shared memory of a program of `integer_gemv`."""

NormMode = Literal["none", "exact", "late", "separate"]


@dataclass(frozen=True, slots=True)
class LinearArgs:
    """A layer y [M, N] = act(norm(x) @ weight^T + bias) + residual.

    Sums are fp32 and rounded once, at the end. The kernel reads weight, scales and bias before the
    preceding kernel on the stream has finished (programmatic dependent launch). So the preceding
    kernel must not write them.

    Attributes:
        x: [M, K], bf16, fp16 or fp32, last axis contiguous.
        weight: [N, K], or [2 N, K] with a gated activation. Without scales it has x's dtype. The
            last axis of its values is contiguous.
        bias: one number for each weight row, or None.
        norm: RMSNorm that is applied to x, or None.
        residual: [M, N], in x's dtype, or None.
        act: activation of the product, or None.
        apart: whether the activation of a gated layer is left out. Then y is gate and up, [M, 2 N].
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
        """The number of outputs."""
        return self.weight.outputs // (2 if self.gated else 1)

    @property
    def k(self) -> int:
        return self.weight.inputs


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """One way to run a linear layer.

    Attributes:
        kernel: "gemv", "mma", "integer", "skinny" or "torch". "mma" is a GEMV on tensor cores, for
            few bits or rows. "integer" is a GEMV in integers, for 4 or 8 bits. "torch" is cuBLAS
            with the other steps as separate kernels.
        bm: rows of x in a tile. For a GEMV it is the padded number of rows. "mma" and "integer"
            have fixed tiles, and use neither bm nor bn nor bk.
        bn: outputs of a tile. A gated tile reads 2 bn weight rows.
        bk: inputs of a tile.
        warps: warps of a program.
        stages: tiles in flight. For "mma" and "integer", chunks that each warp has in flight.
        split_k: number of programs that share one tile's K. The last one to arrive adds their sums,
            in fixed order.
        swap: weights are the left operand, and fill the 64 rows of a Hopper warpgroup.
        norm: "exact" computes each row's mean square before the product. "late" scales the sums
            afterwards, with one pass over x and one rounding less. "separate" runs the norm as its
            own kernel.
        prefetch: bytes of each weight row to prefetch into L2 before waiting for the predecessor.
        eager: whether the successor may start before the wait for the predecessor. It then
            prefetches earlier.
        masked: whether rows past a tile's last row are masked, instead of reading the last row
            again.
        programs: for "integer", number of programs that share the tiles; 0 is one program per tile.
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

    @classmethod
    def from_json(cls, data: Any) -> GemmPlan:
        """See `plans.Plan`."""
        return cls(**data)


TORCH = GemmPlan("torch", norm="separate")


class Shape(NamedTuple):
    """The shape by which a plan is chosen.

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
    """Returns the bits of a stored value as `mma_gemv` counts them. For None it returns 16."""
    return 16 if form is None or form.scales is None else form.bits or 8


def chunk_inputs(bits: int) -> int:
    """Returns the number of inputs in a chunk."""
    return CHUNK_WORDS * 32 // bits


def multiplies(shape: Shape) -> bool:
    """Whether `mma_gemv` supports a shape, on cards that have its instruction."""
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
    """Whether `integer_gemv` supports a shape, on cards of sm_86 and newer."""
    form = shape.format
    if form is None or not multiplies(shape) or shape.dtype != torch.bfloat16:
        return False
    if form.bits == 4:
        fits = form.group == INTEGER_INPUTS and form.scales in (torch.float16, torch.bfloat16)
    else:
        fits = form.values == torch.int8 and not form.group
    return fits and shape.m <= INTEGER_ROWS and shape.k % INTEGER_INPUTS == 0


def integer_segments(k: int, plan: GemmPlan) -> int:
    """Returns the number of segments into which a program of "integer" divides K inputs."""
    return triton.cdiv(k, plan.warps * plan.stages * INTEGER_INPUTS)


def integer_resident(shape: Shape, warps: int, count: int) -> int:
    """Returns the number of programs of "integer" whose registers fit into a multiprocessor.

    `count` is the number of chunks of each warp. The result is 0 if they do not fit into the
    registers of a thread."""
    held = count * (8 if shape.format and shape.format.bits == 4 else 16)
    return 0 if held > (64 if warps == 16 else 104) else 65536 // (32 * warps * (held + 64))


def integer_bytes(shape: Shape, plan: GemmPlan) -> int:
    """Returns the bytes of shared memory of a program of "integer".

    It holds bytes of inputs, sums of warps and, if there are several segments, sums of tiles."""
    rows = triton.next_power_of_2(shape.m)
    size = plan.warps * (plan.stages * rows * 264 + 640)
    if integer_segments(shape.k, plan) > 1:
        tiles = triton.cdiv(shape.n, 8 if shape.gated else 16)
        size += triton.cdiv(tiles, plan.programs or tiles) * plan.warps * 256
    return size


def norms_late(shape: Shape) -> bool:
    """Whether `mma_gemv` applies a norm itself. With few bits each program reads x once more for
    it. In fp16, x * weight without the norm's scale may overflow."""
    return shape.dtype == torch.bfloat16 and (shape.m == 1 or shape.format is None)


def streams(weight: Weight) -> bool:
    """Whether kernels of this package can load tiles of a weight. Other weights are dequantized as
    a whole."""
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
    """A prepared kernel launch."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> None:
        launch(self.kernel, self.grid)(*self.args, **self.options)
