"""Choices that an engine would make on this machine, and why: a section of `quire info`."""

from __future__ import annotations

from typing import Any

import torch

from quire.config import EngineConfig
from quire.layers.dense_and_experts import DenseAndExpertsSpec
from quire.layers.experts import ExpertsSpec
from quire.models import build_model, load_config, model_quantization, spec_from_config
from quire.ops import Policy, use_policy
from quire.runner.graphs import mixed_buckets, row_buckets


def choices_section(config: EngineConfig) -> dict[str, Any]:
    """Returns choice and reason by subject."""
    args, limits = config.args, config.scheduler
    on_gpu = config.device != "cpu"
    section: dict[str, Any] = {
        "dtype": f"{config.dtype}: {_dtype_reason(config, on_gpu)}",
        "steps in flight": f"{limits.steps_in_flight}: {_depth_reason(config, on_gpu)}",
        "step": f"up to {limits.max_num_seqs} requests and {limits.max_num_batched_tokens} tokens: "
        + ("as set" if args.max_num_batched_tokens or args.max_num_seqs else "default here"),
    }
    if not on_gpu:
        section["kernels"] = "PyTorch: the device is a CPU"
        return section
    section["CUDA graphs"] = _graphs(config)
    section.update(_kernels(config))
    return section


def _dtype_reason(config: EngineConfig, on_gpu: bool) -> str:
    if config.args.dtype != "auto":
        return "as set"
    return "the checkpoint's" if on_gpu else "the fastest on a CPU, and exact"


def _depth_reason(config: EngineConfig, on_gpu: bool) -> str:
    if "overlap" in config.args.disable:
        return "overlap is disabled"
    if config.args.steps_in_flight is not None:
        return "as set"
    return "the GPU need not wait for Python" if on_gpu else "on a CPU nothing overlaps"


def _graphs(config: EngineConfig) -> str:
    if config.eager:
        return "off: enforce_eager, or disabled"
    limits = config.scheduler
    decode = len(row_buckets(min(limits.max_num_seqs, limits.max_num_batched_tokens)))
    mixed = len(mixed_buckets(limits.max_num_batched_tokens))
    return (
        f"{decode} bodies for decode steps, 2 x {mixed} for mixed ones of up to "
        f"{limits.max_num_batched_tokens} tokens, {3 * decode} heads"
    )


def _kernels(config: EngineConfig) -> dict[str, str]:
    # Triton is missing on machines without a GPU.
    from quire.ops.triton.launch import gluon_missing, traits

    policy = Policy(
        deterministic=config.args.deterministic, disabled=frozenset(config.args.disable)
    )
    with use_policy(policy):
        card = traits(torch.device(config.device))
    major, minor = card.capability
    pdl = "on" if card.pdl else "off: " + ("disabled" if major >= 9 else "needs sm_90")
    bf16 = "tensor cores" if card.bf16 else "computed in fp32: tensor cores take it from sm_80 on"
    choices = {
        "kernels": f"Triton for sm_{major}{minor}, {card.num_sms} multiprocessors",
        "Hopper's kernels": _hopper_kernels(card.capability, gluon_missing()),
        "dependent launch": pdl,
        "bfloat16": bf16,
        "linear layers": _linear_layers(config),
    }
    experts = _expert_tiles(config)
    return choices if experts is None else {**choices, "experts": experts}


def _hopper_kernels(capability: tuple[int, int], missing: str | None) -> str:
    """missing: why this Triton runs none, see `gluon_missing`."""
    if capability != (9, 0):
        return "off: they need sm_90 exactly"
    return "on" if missing is None else f"off: {missing}"


def _expert_tiles(config: EngineConfig) -> str | None:
    """Returns where the tiles of the model's experts come from; None: it has none."""
    # Triton is missing on machines without a GPU.
    from quire.ops.triton.experts.plan import PLANS

    ffns = [layer.ffn for layer in spec_from_config(load_config(config.model_path)).layers]
    if not any(isinstance(ffn, ExpertsSpec | DenseAndExpertsSpec) for ffn in ffns):
        return None
    if config.args.deterministic:
        return "one tile for any number of tokens: deterministic"
    if config.eager:
        return "tiles by rules: others are measured only for CUDA graphs"
    card = torch.cuda.get_device_name(torch.device(config.device))
    known = len(PLANS.entries(card))
    return f"tiles measured by a model's first start on {card}: {known} in {PLANS.path(card)}"


def _linear_layers(config: EngineConfig) -> str:
    """Returns the sources of the kernel plans of the model's layers, over all numbers of rows."""
    # Triton is missing on machines without a GPU.
    from quire.features.tuning.table_order import products_of
    from quire.ops.triton.products.table import BUCKETS, HEURISTIC_MAX_M, PLANS, key_of

    if config.args.deterministic:
        return "one order of sums for every number of rows: deterministic"
    if "skinny" in config.args.disable:
        return "cuBLAS: our kernels for few rows are disabled"
    hf_config = load_config(config.model_path)
    spec = spec_from_config(hf_config)
    dtype = getattr(torch, config.dtype)
    quantization = model_quantization(config.model_path, hf_config, spec, config.args.quantization)
    model = build_model(spec, device="meta", dtype=dtype, quantization=quantization)
    card = torch.cuda.get_device_name(torch.device(config.device))
    entries = PLANS.entries(card)
    keys = [key_of(shape) for shape in products_of(model, BUCKETS)]
    found = [entries[key] for key in keys if key in entries]
    ours = sum(plan.kernel != "torch" for plan in found)
    if not found:
        return f"rules of thumb, cuBLAS above {HEURISTIC_MAX_M} rows: no table of {card}"
    return (
        f"measured on {card}: of {len(keys)} shapes up to {BUCKETS[-1]} rows {ours} run by our "
        f"kernels, {len(found) - ours} by cuBLAS, {len(keys) - len(found)} by rules of thumb"
    )
