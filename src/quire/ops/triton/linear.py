"""The linear layer on a GPU: one fused kernel for few rows, cuBLAS and other kernels for many."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.arguments import Activation, RmsScale
from quire.ops.choose import current_policy
from quire.ops.reference.quantized import dequantize as dequantize_any
from quire.ops.triton.activation import run as activate
from quire.ops.triton.launch import DeviceTraits, traits
from quire.ops.triton.norm import rms_norm
from quire.ops.triton.products import block_gemv
from quire.ops.triton.products.eight_bit import product, takes
from quire.ops.triton.products.plan import MMA_ROWS, streams
from quire.ops.triton.products.quantized_tiles import dequantize
from quire.ops.triton.products.round_inputs import round_inputs
from quire.ops.triton.products.small import LinearArgs, run_fixed, small_linear
from quire.ops.triton.products.table import BUCKETS
from quire.ops.weight import Weight

_FEW_ROWS = 32
"""Up to this many rows, inputs that were rounded to 8 bits are multiplied as 16-bit numbers."""


def linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: RmsScale | None = None,
    act: Activation | None = None,
) -> Tensor:
    """See `ops.linear`.

    A whole weight is dequantized first if no kernel loads its format, or if there are many rows."""
    policy = current_policy()
    if weight.format.inputs != "none":
        if not policy.deterministic and takes(weight) and loads(weight):
            args = LinearArgs(x, weight, bias, norm, residual, act)
            if traits(x.device).capability >= (8, 9) and block_gemv.takes(args):
                return block_gemv.product(args)
            if (blocks := _hopper_blocks(traits(x.device))) and blocks.takes(args):
                return blocks.product(args)
            # With few rows, reading the weight takes most of the time, in any dtype of the
            # product.
            if len(x) > _FEW_ROWS:
                return product(args)
        x, norm = round_inputs(x, weight, norm), None
    if weight.scales is not None and not loads(weight):
        weight = Weight.plain(dequantize_any(weight, x.dtype))
    if policy.deterministic:
        return run_fixed(LinearArgs(x, weight, bias, norm, residual, act), rms_norm=_normed)
    if "fusions" in policy.disabled and (norm or act or residual is not None):
        if norm is not None:
            x = rms_norm(x, *norm)
        return _finish(linear(x, weight, bias), residual, act)
    if weight.scales is not None and len(x) > MMA_ROWS and "skinny" not in policy.disabled:
        hopper = _hopper_few_bits(traits(x.device))
        args = LinearArgs(x, weight, bias, norm, residual, act)
        if hopper is not None and hopper.takes(args):
            return hopper.product(args)
    if len(x) <= BUCKETS[-1] and "skinny" not in policy.disabled:
        args = LinearArgs(x, weight, bias, norm, residual, act)
        if (narrow := _hopper_narrow(traits(x.device))) and narrow.takes(args):
            return narrow.product(args)
        out = small_linear(args, rms_norm=_normed)
        if out is not None:
            return out
    if norm is not None:
        x = rms_norm(x, *norm)
    values = weight.values if weight.scales is None else dequantize(weight, x.dtype)
    args = LinearArgs(x, Weight.plain(values), bias, None, residual, act)
    if args.gated and (hopper := _hopper_gated(traits(x.device))) and hopper.takes(args):
        return hopper.gated_product(args)
    if act is None and residual is not None and bias is None:
        # In place, because otherwise `addmm` first copies the residual to the result's memory.
        return torch.addmm(residual, x, values.t(), out=residual)
    return _finish(F.linear(x, values, bias), residual, act)


@functools.cache
def _hopper_gated(card: DeviceTraits) -> ModuleType | None:
    """Returns the module for gated layers on Hopper cards, or None on other cards."""
    return importlib.import_module("quire.ops.triton.experts.hopper_gated") if card.gluon else None


@functools.cache
def _hopper_few_bits(card: DeviceTraits) -> ModuleType | None:
    """Returns the module for weights of few bits on Hopper cards, or None on other cards."""
    return importlib.import_module("quire.ops.triton.products.hopper_gemm") if card.gluon else None


@functools.cache
def _hopper_blocks(card: DeviceTraits) -> ModuleType | None:
    """Returns the module for 8-bit floats in groups on Hopper cards, or None on other cards."""
    return (
        importlib.import_module("quire.ops.triton.products.hopper_blocks") if card.gluon else None
    )


@functools.cache
def _hopper_narrow(card: DeviceTraits) -> ModuleType | None:
    """Returns the module for few rows and 16-bit weights on Hopper cards, or None on others."""
    return (
        importlib.import_module("quire.ops.triton.products.hopper_narrow") if card.gluon else None
    )


def loads(weight: Weight) -> bool:
    """Whether kernels can load the weight on its card. 8-bit floats need sm_89."""
    floats = weight.dtype == torch.float8_e4m3fn
    device = weight.values.device
    old = floats and device.type == "cuda" and traits(device).capability < (8, 9)
    return streams(weight) and not old


def _finish(out: Tensor, residual: Tensor | None, act: Activation | None) -> Tensor:
    if act is not None:
        out = activate(out, act)
    return out if residual is None else out.add_(residual)


def _normed(x: Tensor, norm: RmsScale) -> Tensor:
    return rms_norm(x, norm.weight, norm.eps)
