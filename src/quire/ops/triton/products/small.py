"""Linear layers for few rows: norm, product, bias, activation and residual in one kernel.

`linear.py` calls `small_linear`, which returns None if cuBLAS with separate kernels for the other
steps is faster."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.ops.arguments import RmsScale
from quire.ops.triton.launch import traits
from quire.ops.triton.products.gemv import gemv
from quire.ops.triton.products.integer_gemv import integer_gemv
from quire.ops.triton.products.mma_gemv import mma_gemv
from quire.ops.triton.products.plan import (
    GATED,
    INTEGER_BYTES,
    PLAIN,
    GemmPlan,
    Launch,
    LinearArgs,
    Shape,
    counts,
    integer_bytes,
    multiplies,
    norms_late,
    shape_of,
    streams,
)
from quire.ops.triton.products.skinny import MAX_SPLIT_TILES, Workspace, skinny_gemm
from quire.ops.triton.products.table import plan_for, rows_plan

__all__ = [
    "LinearArgs",
    "choose",
    "fuses_norm",
    "prepare",
    "run",
    "run_fixed",
    "small_linear",
]


@functools.cache
def _card(index: int | None) -> str:
    return "cpu" if index is None else torch.cuda.get_device_name(index)


@functools.lru_cache(maxsize=4096)
def _choose(shape: Shape, device: torch.device) -> GemmPlan:
    index = None
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
    return plan_for(shape, _card(index), traits(device))


@functools.lru_cache(maxsize=64)
def _workspace(device: torch.device, thread: int) -> Workspace:
    return Workspace.allocate(device)


def default_workspace(device: torch.device) -> Workspace:
    """Returns the workspace of a device and thread.

    A thread that launches on several streams at once must make its own workspace for each. The
    first call must not be made during a graph capture."""
    return _workspace(device, threading.get_ident())


def choose(args: LinearArgs) -> GemmPlan:
    """Returns the plan for a layer. Cached by shape."""
    return _choose(shape_of(args), args.x.device)


def _check(args: LinearArgs, plan: GemmPlan) -> None:
    x, weight = args.x, args.weight
    if args.act is not None and args.act not in GATED and args.act not in PLAIN:
        known = ", ".join((*GATED, *PLAIN))
        raise ConfigError(f"unknown activation {args.act!r}; expected one of: {known}", "act")
    if not streams(weight):
        raise ConfigError(f"no kernel loads weights of the format {weight.format.key}", "weight")
    mixed = weight.scales is None and x.dtype != weight.dtype
    if x.ndim != 2 or x.shape[1] != weight.inputs or mixed:
        raise ConfigError(
            f"x {tuple(x.shape)} {x.dtype} does not fit weight {tuple(weight.values.shape)} "
            f"{weight.dtype}",
            "x",
        )
    if weight.format.group and not _fits(plan.bk, weight.format.group):
        raise ConfigError(f"tiles of {plan.bk} inputs cut groups of {weight.format.group}", "plan")
    if x.stride(1) != 1 or weight.values.stride(1) != 1:
        raise ConfigError("the last axis of x and of the weight must be contiguous", "x")
    res = args.residual
    if res is not None and (res.shape != (x.shape[0], args.n) or res.stride(1) != 1):
        raise ConfigError(
            f"residual {tuple(res.shape)} must be {(x.shape[0], args.n)}, last axis contiguous",
            "residual",
        )


def _fits(bk: int, group: int) -> bool:
    return bk % group == 0 or group % bk == 0


def fuses_norm(args: LinearArgs, plan: GemmPlan) -> bool:
    """Whether the plan's kernel applies the layer's norm."""
    if plan.kernel not in ("mma", "integer"):
        return plan.norm != "separate"
    alike = args.norm is not None and args.norm.weight.dtype == args.x.dtype
    return plan.norm == "late" and alike and norms_late(shape_of(args))


def prepare(
    args: LinearArgs, plan: GemmPlan, out: Tensor, *, workspace: Workspace | None = None,
    pdl: bool | None = None,
) -> Launch:  # fmt: skip
    """Returns the launch that writes a layer to `out` [M, N]. See `run`."""
    _check(args, plan)
    x = args.x
    pdl = traits(x.device).pdl if pdl is None else pdl
    if plan.kernel in ("mma", "integer"):
        shape, integer = shape_of(args), plan.kernel == "integer"
        takes = multiplies(shape) and shape.m <= plan.bm
        if integer:
            takes = counts(shape) and integer_bytes(shape, plan) <= INTEGER_BYTES
        if not (takes and (args.norm is None or fuses_norm(args, plan))):
            raise ConfigError(f"plan.kernel {plan.kernel!r} does not support this layer", "plan")
        return (integer_gemv if integer else mma_gemv)(args, out, plan, pdl=pdl)
    if args.norm is not None:
        # Tensor cores would get x * weight without the norm's scale, which may overflow fp16.
        risky = plan.norm == "late" and plan.kernel == "skinny" and x.dtype == torch.float16
        if risky or plan.norm in ("none", "separate"):
            plan = replace(plan, norm="exact")
    if plan.kernel == "gemv":
        if x.shape[0] > plan.bm:
            raise ConfigError(f"the plan is for {plan.bm} rows, but x has {x.shape[0]}", "plan")
        return gemv(args, out, plan, pdl=pdl)
    if plan.kernel == "skinny":
        tiles = -(-args.n // plan.bn) * -(-x.shape[0] // plan.bm)
        if tiles > MAX_SPLIT_TILES:
            plan = replace(plan, split_k=1)
        return skinny_gemm(args, out, plan, workspace or default_workspace(x.device), pdl=pdl)
    raise ConfigError(f"plan.kernel {plan.kernel!r} is not a kernel of this package", "plan")


def run(
    args: LinearArgs, plan: GemmPlan, *, out: Tensor | None = None,
    out_dtype: torch.dtype | None = None, workspace: Workspace | None = None,
    pdl: bool | None = None,
) -> Tensor:  # fmt: skip
    """Runs a layer by a plan of one of this package's kernels, with the norm fused.

    Args:
        out: [M, N], or [M, 2 N] for a layer with `apart`; by default a new tensor. It may be the
            residual, but not x.
        out_dtype: dtype of a new `out`; by default x's.
        workspace: for split-K; by default one per device and thread.
        pdl: programmatic dependent launch; by default it is used on cards that have it.
    """
    if out is None:
        shape = (args.x.shape[0], args.weight.outputs if args.apart else args.n)
        out = torch.empty(shape, dtype=out_dtype or args.x.dtype, device=args.x.device)
    if out.numel():
        prepare(args, plan, out, workspace=workspace, pdl=pdl).run()
    return out


def small_linear(
    args: LinearArgs, *, rms_norm: Callable[[Tensor, RmsScale], Tensor],
    out_dtype: torch.dtype | None = None,
) -> Tensor | None:  # fmt: skip
    """Returns act(norm(x) @ weight^T + bias) + residual, or None if cuBLAS is faster.

    `rms_norm` runs the norm as a separate kernel. It is used if fusing costs more than it saves."""
    plan = choose(args)
    if plan.kernel == "torch":
        return None
    if args.norm is not None and not fuses_norm(args, plan):
        args = replace(args, x=rms_norm(args.x, args.norm), norm=None)
    return run(args, plan, out_dtype=out_dtype)


def run_fixed(args: LinearArgs, *, rms_norm: Callable[[Tensor, RmsScale], Tensor]) -> Tensor:
    """Runs a layer with any number of rows by one plan with one order of sums.

    So a row's result has the same bits in every batch."""
    if args.norm is not None:
        args = replace(args, x=rms_norm(args.x, args.norm), norm=None)
    return run(args, rows_plan(shape_of(args), traits(args.x.device)))
