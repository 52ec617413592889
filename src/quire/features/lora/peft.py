"""Reads adapters in PEFT's format in the background, and downloads them from the hub."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from quire.errors import ModelError, RequestError
from quire.features.lora import peft
from quire.features.lora.patterns import ModulePatterns
from quire.features.lora.projections import Adapter, AdapterLayout, LowRank, Target
from quire.features.lora.registry import CONFIG
from quire.models.config import is_hub_id
from quire.models.files import download_adapter
from quire.quantization import FLOATS
from quire.system import read_bounded

Result = TypeVar("Result")


def start(name: str, work: Callable[[], Result]) -> Future[Result]:
    """Calls `work` on its own daemon thread. Returns a future of its result."""
    result: Future[Result] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result


# Adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

WEIGHTS = "adapter_model.safetensors"

MOST_RANK = 256
_MOST_CONFIG_BYTES = 1 << 20
_READ_SECONDS = 60.0
_HEADER_BYTES = 16 << 20
"""Room for the header of the largest file."""

_KNOWN = frozenset(
    {
        "alpha_pattern", "arrow_config", "auto_mapping", "base_model_name_or_path", "bias",
        "corda_config", "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode",
        "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout",
        "lora_ga_config", "loftq_config", "megatron_core", "modules_to_save",
        "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern",
        "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
    }
)  # fmt: skip
"""Keys that this module reads, or that concern only training."""
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Values of init_lora_weights that also change the base model's weights."""

_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
_ELSEWHERE = re.compile(r"lora_embedding_|embed_tokens|\bwte\b|\bwpe\b|lm_head")


def read_adapter(folder: Path, layout: AdapterLayout) -> Adapter:
    """Returns the adapter in a folder, for a model. It takes as long as reading the file.

    Raises:
        RequestError: there is no adapter, it is damaged, or the model cannot be served with it. The
            message names the wrong key of its config or the wrong tensor.
    """
    raw, config = _config(folder)
    rank = _count(config, "r", 8)
    ranks, alphas = _mapping(config, "rank_pattern"), _mapping(config, "alpha_pattern")
    for value in (rank, *ranks.values()):
        _check_rank(value, layout)
    rank_patterns = ModulePatterns("rank_pattern", ranks)
    alpha_patterns = ModulePatterns("alpha_pattern", alphas)
    data = _bytes(folder / WEIGHTS, layout.most_bytes + _HEADER_BYTES)
    try:
        tensors = safetensors.torch.load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise _wrong(f"{WEIGHTS} cannot be read: {error}") from None
    digest = hashlib.blake2b(raw, digest_size=16)
    digest.update(data)
    adapter = Adapter(digest.hexdigest())
    for module, (a, b) in _pairs(tensors).items():
        targets = layout.targets.get(layout.canonical(module))
        if targets is None:
            raise _wrong(f"{module}: the model has no linear layer of this name")
        expected = rank_patterns.value(module, rank)
        _check(module, a, b, targets, expected)
        alpha = alpha_patterns.value(module, config.get("lora_alpha", 8))
        scale = _scale(config, alpha, expected)
        for target in targets:
            own_a, own_b = a.to(layout.dtype), target.rows(b).to(layout.dtype)
            for name, cast in (("A", own_a), ("B", own_b)):
                # Tokens of other adapters multiply these values by zero. Infinity would give NaN.
                if not bool(torch.isfinite(cast).all()):
                    dtype = str(layout.dtype).removeprefix("torch.")
                    raise _wrong(f"{module}.lora_{name}.weight holds values beyond {dtype}")
            part = LowRank(own_a, own_b, scale)
            adapter.parts[target.layer, target.place] = part
    if not adapter.parts:
        raise _wrong(f"{WEIGHTS} holds no tensor of an adapter")
    return adapter


def _config(folder: Path) -> tuple[bytes, Mapping[str, Any]]:
    """Returns adapter_config.json as bytes and as a table."""
    raw = _bytes(folder / CONFIG, _MOST_CONFIG_BYTES)
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"{CONFIG} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise _wrong(f"{CONFIG} is not a table")
    if config.get("peft_type") != "LORA":
        raise _wrong(f"{CONFIG}: peft_type {_shown(config.get('peft_type'))} is not LORA")
    for name in ("use_dora", "modules_to_save", "lora_bias"):
        if config.get(name):
            raise _wrong(f"{CONFIG}: {name} is not supported")
    if config.get("bias", "none") != "none":
        raise _wrong(f"{CONFIG}: bias {_shown(config['bias'])} is not supported, only none")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise _wrong(
            f"{CONFIG}: init_lora_weights {_shown(start)} has changed the base model's weights; "
            "convert the adapter to a plain one"
        )
    for name in sorted(config.keys() - _KNOWN):
        if config[name]:
            raise _wrong(f"{CONFIG}: {name[:100]} is not supported")
    return raw, config


def _bytes(path: Path, most: int) -> bytes:
    """Returns a file's content. It gives up after `_READ_SECONDS`, because a file on a network may
    never arrive."""
    try:
        read = peft.start("adapter-file", lambda: read_bounded(path, most))
        return read.result(_READ_SECONDS)
    except TimeoutError:
        reason = f"it was not read within {_READ_SECONDS:g} s"
    except ValueError as error:
        reason = str(error)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise _wrong(
                f"{path.name} has more than {most} bytes, the largest adapter of this model that "
                "max_lora_rank allows"
            ) from None
        reason = str(error.strerror)
    raise _wrong(f"{path.name} cannot be read: {reason}")


def _pairs(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns A and B by the name of their module."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in sorted(tensors.items()):
        if _ELSEWHERE.search(name):
            raise _wrong(f"{name}: adapters of embeddings and of the head are not supported")
        if "lora_magnitude_vector" in name:
            raise _wrong(f"{name}: DoRA is not supported")
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise _wrong(f"{name} is not a part of a plain LoRA adapter")
        if tensor.dtype not in FLOATS:
            raise _wrong(f"{name} has dtype {str(tensor.dtype).removeprefix('torch.')}")
        if not bool(torch.isfinite(tensor).all()):
            raise _wrong(f"{name} holds infinite values or NaN")
        parts = found.setdefault(match["module"], {})
        if match["part"] in parts:
            raise _wrong(f"{name} occurs twice")
        parts[match["part"]] = tensor
    for module, parts in found.items():
        for part in "AB":
            if part not in parts:
                raise _wrong(f"{module}.lora_{part}.weight is missing")
    return {module: (parts["A"], parts["B"]) for module, parts in found.items()}


def _check(module: str, a: Tensor, b: Tensor, targets: list[Target], rank: int) -> None:
    """Raises RequestError unless the tensors fit the module."""
    outputs = max(target.outputs for target in targets)
    for part, tensor, shape in (
        ("A", a, (rank, targets[0].inputs)),
        ("B", b, (outputs, rank)),
    ):
        if tuple(tensor.shape) != shape:
            raise _wrong(
                f"{module}.lora_{part}.weight has shape {tuple(tensor.shape)}, expected {shape}"
            )


def _scale(config: Mapping[str, Any], alpha: Any, rank: int) -> float:
    """Returns alpha / rank, or alpha / sqrt(rank) with rsLoRA (Kalajdzievski 2023)."""
    # Kernels have the scale in float32.
    largest = torch.finfo(torch.float32).max
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= largest:
        raise _wrong(f"{CONFIG}: lora_alpha {_shown(alpha)} is not a number of float32")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _mapping(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise _wrong(f"{CONFIG}: {name} is not a table")
    return value


def _count(config: Mapping[str, Any], name: str, default: int) -> Any:
    return config.get(name, default)


def _check_rank(rank: Any, layout: AdapterLayout) -> None:
    if type(rank) is not int or not 1 <= rank <= MOST_RANK:
        raise _wrong(f"{CONFIG}: the rank {_shown(rank)} is not an integer from 1 to {MOST_RANK}")
    if rank > layout.rank:
        raise _wrong(f"{CONFIG}: the rank {rank} is more than max_lora_rank={layout.rank}")


def _shown(value: Any) -> str:
    return repr(value)[:100]


def _wrong(message: str) -> RequestError:
    return RequestError(message, "lora_path", "invalid_adapter")


# Adapters of the Hugging Face hub, downloaded to a folder of this machine.


def on_the_hub(path: str) -> bool:
    """Returns whether an adapter's path is not a local folder and may be a hub id."""
    return path.count("/") == 1 and is_hub_id(path)


def fetch_now(hub_id: str) -> str:
    """Downloads an adapter from the hub. Returns its folder. Raises RequestError."""
    try:
        return str(download_adapter(hub_id))
    except ModelError as error:
        raise RequestError(str(error), "lora_path", "invalid_adapter") from None


def fetch(hub_id: str) -> Future[str]:
    """Does what `fetch_now` does, on its own daemon thread."""
    return peft.start("adapter-fetch", lambda: fetch_now(hub_id))
