"""The feed-forward layers of experts on a GPU.

For few tokens, two kernels follow the router. Each reads only the weights of chosen experts.
`integer` or `mma` run if they support the weights. For more tokens, the device first sorts
assignments by expert. Then come two products over blocks of tokens of one expert, and the sum over
each token's experts, in fixed order. For many tokens, 4-bit floats are widened once instead of for
each tile. On Hopper cards `hopper_experts` computes products of 16 bits."""

from __future__ import annotations

import importlib

import torch
import triton
from torch import Tensor

from quire.errors import ConfigError
from quire.ops.branch import PendingTensor, join_branch
from quire.ops.experts import ExpertWeights, Swiglu, expands
from quire.ops.reference.segments import columns
from quire.ops.triton.experts.integer import counts, has_instructions, integer_product
from quire.ops.triton.experts.kernels import (
    combine_kernel,
    down_gemv_kernel,
    grouped_kernel,
    up_gemv_kernel,
)
from quire.ops.triton.experts.mma import aligned, mma_rows, mma_sum, multiplies
from quire.ops.triton.experts.plan import (
    FIXED_DOWN,
    FIXED_UP,
    AnyTile,
    ExpertsPlan,
    ExpertsShape,
    IntegerTile,
    MmaTile,
    RingTile,
    Tile,
    bits_of,
    chosen_plan,
)
from quire.ops.triton.experts.route import Sorted, sort_by_expert
from quire.ops.triton.launch import launch, options, traits
from quire.ops.triton.products.quantized_tiles import Operands, dequantize
from quire.ops.triton.products.round_inputs import round_inputs
from quire.ops.weight import Weight

_EARLY_BITS = 64 * 32
"""Bits of a thread's registers for weights that are loaded before the units are computed."""
_EARLY_TOKENS = 2
"""The most tokens for which weights are loaded early. With more tokens it is better to use the
registers for more programs."""


def experts_mlp(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: ExpertWeights,
    down: ExpertWeights,
    act: Swiglu,
    residual: Tensor | PendingTensor | None = None,
) -> Tensor:
    """See `reference.experts.experts_mlp`. The host reads nothing."""
    plan = chosen_plan(shape_of(x, ids, up, down))
    return run_experts(plan, x, ids, weights, up, down, act, residual)


def shape_of(x: Tensor, ids: Tensor, up: ExpertWeights, down: ExpertWeights) -> ExpertsShape:
    """Returns the shape by which the plan for a layer and tokens x is chosen."""
    return ExpertsShape(
        len(x), up.total, ids.shape[1], x.shape[1], down.weight.inputs, x.dtype,
        bits_of(up.weight.format), takes_mma(x, up, down),
        expands(up.weight.format, ids.numel(), up.total), up.weight.dtype.is_floating_point,
        takes_ring(x, up, down), traits(x.device).shared_memory, up.weight.format.key,
        takes_integers(x, up, down, ids.shape[1]),
    )  # fmt: skip


def takes_mma(x: Tensor, up: ExpertWeights, down: ExpertWeights) -> bool:
    """Whether `mma` supports a layer's weights and tokens like x, on this device."""
    # Units have the dtype of x. Their rows begin at multiples of 16 bytes if the weights' rows do.
    alike = up.weight.format == down.weight.format and down.weight.inputs % 8 == 0
    return alike and traits(x.device).bf16 and all(multiplies(own.weight, x) for own in (up, down))


def takes_integers(x: Tensor, up: ExpertWeights, down: ExpertWeights, top_k: int) -> bool:
    """Whether `integer` supports a layer's weights and tokens like x, on this device."""
    # Rows of units begin at multiples of 16 bytes if the weights' rows do.
    taken = counts(up.weight, x, 1) and counts(down.weight, x, top_k)
    return taken and has_instructions(up.weight.format, traits(x.device))


def takes_ring(x: Tensor, up: ExpertWeights, down: ExpertWeights) -> bool:
    """Whether `hopper_experts` supports a layer's weights, or their expansion, and tokens like x,
    on this device.

    It needs 16 bits, and rows that begin at multiples of 16 bytes."""
    if not traits(x.device).gluon or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    own = [linear.weight for linear in (up, down)]
    plain = all(
        weight.format.scales is not None
        or (weight.values.dtype == x.dtype and aligned(weight.values))
        for weight in own
    )
    return plain and all(weight.inputs % 8 == 0 for weight in own)


def run_experts(
    plan: ExpertsPlan, x: Tensor, ids: Tensor, weights: Tensor, up: ExpertWeights,
    down: ExpertWeights, act: Swiglu, residual: Tensor | PendingTensor | None = None,
) -> Tensor:  # fmt: skip
    """Runs a layer's experts by a plan, see `experts_mlp`.

    Raises:
        ConfigError: the plan's kernel, or every kernel, cannot load the weights.
    """
    for own, tile in ((up, plan.up), (down, plan.down)):
        _check(own.weight)
        if isinstance(tile, MmaTile) and not multiplies(own.weight, x):
            raise ConfigError("the plan's kernel `mma` does not support these weights", "plan")
        summed = ids.shape[1] if own is down else 1
        if isinstance(tile, IntegerTile) and not counts(own.weight, x, summed):
            raise ConfigError("the plan's kernel `integer` does not support these weights", "plan")
    tokens, top_k = ids.shape
    out = torch.empty(tokens, down.outputs, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    x = _rounded(x, up.weight)
    inner = torch.empty(tokens * top_k, down.weight.inputs, dtype=x.dtype, device=x.device)
    if plan.kernel == "gemv":
        _rows_of_each(plan.up, x, ids, weights, up, act, inner)
        inner = _rounded(inner, down.weight)
        if isinstance(plan.down, IntegerTile):
            own_residual = join_branch(residual)
            integer_product(plan.down, inner, ids, weights, down, None, own_residual, out)
        elif isinstance(plan.down, MmaTile):
            mma_sum(plan.down, inner, ids, weights, down, join_branch(residual), out)
        elif isinstance(plan.down, Tile):
            _down_gemv(plan.down, inner, ids, weights, down, join_branch(residual), out)
        return out
    order = sort_by_expert(ids, up.experts, plan.up.bm)
    if plan.expand:
        up = _expanded(up, x.dtype)
    _rows(plan.up, x, ids, order, weights, up, act, inner, top_k)
    del up  # The second product reuses the memory of expanded weights.
    inner = _rounded(inner, down.weight)
    parts = torch.empty(tokens * top_k, down.outputs, dtype=x.dtype, device=x.device)
    if plan.expand:
        down = _expanded(down, x.dtype)
    _rows(plan.down, inner, ids, order, weights, down, None, parts, 1)
    _combine(parts, ids, join_branch(residual), out)
    return out


def expert_segments(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: ExpertWeights,
    down: ExpertWeights,
    act: Swiglu,
    segments: int,
) -> Tensor:
    """See `reference.segments.expert_segments`."""
    tokens, top_k = ids.shape
    width = down.weight.inputs
    for own in (up, down):
        _check(own.weight)
    out = torch.empty(segments, tokens, down.outputs, dtype=torch.float32, device=x.device)
    if not tokens:
        return out
    inner = torch.empty(tokens * top_k, width, dtype=x.dtype, device=x.device)
    order = sort_by_expert(ids, up.experts, FIXED_UP.bm)
    _grouped(FIXED_UP, _rounded(x, up.weight), order, weights, up, act, inner, top_k)
    inner = _rounded(inner, down.weight)
    parts = torch.empty(tokens * top_k, down.outputs, dtype=torch.float32, device=x.device)
    for index, own_inner in enumerate(inner.chunk(segments, 1)):
        first = index * own_inner.shape[1]
        own = down._replace(
            weight=columns(down.weight, first, first + own_inner.shape[1]),
            bias=None if index else down.bias,
        )
        _grouped(FIXED_DOWN, own_inner, order, weights, own, None, parts, 1)
        _combine(parts, ids, None, out[index])
    return out


def _check(weight: Weight) -> None:
    format = weight.format
    known = format.code in ("integer", "e2m1") and not format.ordered and not weight.first
    if format.group and (format.group < 16 or format.group & (format.group - 1)):
        known = False
    if format.bits and (weight.inputs % 8 or format.bits != 4):
        known = False
    if not known:
        raise ConfigError(
            f"no kernel loads experts' weights of the format {format.key} with {weight.inputs} "
            f"inputs that begin at input {weight.first} of a group"
        )
    major, minor = traits(weight.values.device).capability
    if weight.dtype == torch.float8_e4m3fn and (0, 0) < (major, minor) < (8, 9):
        raise ConfigError(
            "experts' weights in 8-bit floats need a card of sm_89 or newer, and this one is "
            f"sm_{major}{minor}; --quantization int8 works on this card",
            "quantization",
        )


def _rounded(x: Tensor, weight: Weight) -> Tensor:
    return x if weight.format.inputs == "none" else round_inputs(x, weight)


def _expanded(linear: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    return linear._replace(weight=Weight.plain(dequantize(linear.weight, dtype)))


def _formats(own: Operands, k: int, tile: Tile) -> dict[str, object]:
    """Returns the compile-time constants of a weight and of its tiles."""
    return {
        "HAS_SCALES": own.has_scales, "BITS": own.bits, "GROUP": own.group,
        "HAS_ZEROS": own.has_zeros, "E2M1": own.e2m1, "BN": tile.bn, "BK": tile.bk,
        "EVEN_K": k % tile.bk == 0, "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


def _acts(act: Swiglu | None) -> dict[str, float]:
    act = act or Swiglu()
    return {"ALPHA": act.alpha, "LIMIT": act.limit, "SHIFT": act.shift, "CUBIC": act.cubic}


def _rows_of_each(
    tile: AnyTile, x: Tensor, ids: Tensor, weights: Tensor, up: ExpertWeights,
    act: Swiglu,
    out: Tensor,
) -> None:  # fmt: skip
    """Computes the units of each assignment by itself."""
    if isinstance(tile, IntegerTile):
        integer_product(tile, x, ids, weights, up, act, None, out)
    elif isinstance(tile, MmaTile):
        mma_rows(tile, x, ids, None, weights, up, act, out, ids.shape[1])
    elif isinstance(tile, Tile):
        _up_gemv(tile, x, ids, up, act, out)


def _rows(
    tile: AnyTile, x: Tensor, ids: Tensor, order: Sorted, weights: Tensor,
    linear: ExpertWeights, act: Swiglu | None, out: Tensor, rows_per_x: int,
) -> None:  # fmt: skip
    """Computes one product over blocks of sorted tokens.

    With an activation the result is gated units, otherwise weighted outputs."""
    if isinstance(tile, MmaTile):
        mma_rows(tile, x, ids, order, weights, linear, act, out, rows_per_x)
    elif isinstance(tile, RingTile):
        # Imported here because it needs a version of Gluon that not every Triton has.
        ring = importlib.import_module("quire.ops.triton.experts.hopper_experts")
        # The units are in the order of experts already.
        x = x if act is None else ring.gather_rows(x, order, rows_per_x)
        ring.ring_product(tile, x, order, weights, linear, act, out)
    elif isinstance(tile, Tile):
        _grouped(tile, x, order, weights, linear, act, out, rows_per_x)


def _up_gemv(
    tile: Tile, x: Tensor, ids: Tensor, up: ExpertWeights, act: Swiglu, out: Tensor
) -> None:
    own, n, k, pdl = Operands(up.weight), up.outputs // 2, x.shape[1], traits(x.device).pdl
    launch(up_gemv_kernel, (triton.cdiv(n, tile.bn), ids.numel()))(
        x, ids, own.values, own.scales, own.zeros, x if up.bias is None else up.bias, out, n, k,
        x.stride(0), own.values.stride(0), own.scales.stride(0),
        TOP_K=ids.shape[1], HAS_BIAS=up.bias is not None, PDL=pdl, **_acts(act),
        **options(pdl, **_formats(own, k, tile)),
    )  # fmt: skip


def _down_gemv(
    tile: Tile, inner: Tensor, ids: Tensor, weights: Tensor, down: ExpertWeights,
    residual: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    own, n, k = Operands(down.weight), down.outputs, inner.shape[1]
    tokens, top_k = ids.shape
    pdl = traits(inner.device).pdl
    launch(down_gemv_kernel, (triton.cdiv(n, tile.bn), tokens))(
        inner, ids, weights, own.values, own.scales, own.zeros,
        inner if down.bias is None else down.bias, inner if residual is None else residual, out,
        n, k, own.values.stride(0), own.scales.stride(0),
        0 if residual is None else residual.stride(0), out.stride(0),
        TOP_K=top_k, KP=triton.next_power_of_2(top_k), HAS_BIAS=down.bias is not None,
        HAS_RES=residual is not None, EARLY=_early_tiles(tile, k, ids, down.weight),
        PDL=pdl, **options(pdl, **_formats(own, k, tile)),
    )  # fmt: skip


def _early_tiles(tile: Tile, inputs: int, ids: Tensor, weight: Weight) -> int:
    """Returns the number of weight tiles that threads can load before the units are computed."""
    tokens, top_k = ids.shape
    if tokens > _EARLY_TOKENS:
        return 0
    bits = tile.bn * tile.bk * top_k * bits_of(weight.format)
    return min(triton.cdiv(inputs, tile.bk), _EARLY_BITS // (bits // (32 * tile.warps)))


def _grouped(
    tile: Tile, x: Tensor, order: Sorted, weights: Tensor, linear: ExpertWeights,
    act: Swiglu | None, out: Tensor, rows_per_x: int,
) -> None:  # fmt: skip
    """See `_rows`."""
    own, n, k = Operands(linear.weight), out.shape[1], x.shape[1]
    card = traits(x.device)
    launch(grouped_kernel, (order.most, triton.cdiv(n, tile.bn)))(
        x, order.order, order.blocks, order.most, weights, own.values, own.scales, own.zeros,
        x if linear.bias is None else linear.bias, out, n, k, x.stride(0), own.values.stride(0),
        own.scales.stride(0), ROWS_PER_X=rows_per_x, BM=tile.bm, GATED=act is not None,
        HAS_BIAS=linear.bias is not None, SWAP=tile.swap,
        UPCAST=x.dtype == torch.bfloat16 and not card.bf16, PDL=card.pdl, **_acts(act),
        **options(card.pdl, **_formats(own, k, tile)),
    )  # fmt: skip


def _combine(parts: Tensor, ids: Tensor, residual: Tensor | None, out: Tensor) -> None:
    tokens, n = out.shape
    bn = min(1024, triton.next_power_of_2(n))
    pdl = traits(parts.device).pdl
    launch(combine_kernel, (tokens, triton.cdiv(n, bn)))(
        parts, ids, parts if residual is None else residual, out, n,
        0 if residual is None else residual.stride(0), out.stride(0),
        TOP_K=ids.shape[1], BN=bn, HAS_RES=residual is not None, PDL=pdl,
        **options(pdl, num_warps=4),
    )  # fmt: skip
