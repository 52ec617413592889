"""The static scales of FP8 KV that a checkpoint may hold."""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.models.decoder import DecoderLayers
from quire.models.files import open_file, weight_files
from quire.parallel.sharding import ShardSpec

_log = logging.getLogger(__name__)

_STORED = re.compile(
    r"(?:^|\.)layers\.(?P<layer>\d+)\.self_attn\."
    r"(?:(?:attn\.|[kv]_proj\.)?(?P<kind>[kv])_scale|(?P<output>[kv])_proj\.output_scale)$"
)
"""Names of scales from compressed-tensors, vLLM, AutoFP8 and ModelOpt."""
_OTHER = re.compile(r"\.self_attn\.(attn\.)?(q|prob)_scale$")
"""Scales of queries and softmax weights. They are not used, because neither is stored in FP8."""


def is_scale(name: str) -> bool:
    """Returns whether a checkpoint's tensor is a scale for attention instead of a weight."""
    return bool(_STORED.search(name) or _OTHER.search(name))


def head_scales(model: DecoderLayers, path: Path, load_format: str) -> Tensor:
    """Returns the factors by which stored keys and values are multiplied.

    Latents use the scale of keys and count as one head, on every rank.

    Args:
        model: its layers and ranks.
        path: folder of the checkpoint.
        load_format: "dummy" makes all factors 1.

    Returns:
        float32 [layers, 2, KV heads of this rank] on the model's device; 1 if the checkpoint has no
        scales.

    Raises:
        ModelError: some scales are missing or invalid, or layers differ in their KV heads.
    """
    layers = len(model.spec.layers)
    counts = {mixer.kv_heads for mixer in model.spec.attention} or {1}
    kinds = 2 if model.spec.attention else 1
    if len(counts) > 1:
        raise ModelError(f"fp8 KV needs the same KV heads in all layers, got {sorted(counts)}")
    heads = counts.pop()
    scales = torch.ones(layers, 2, heads)
    found = {} if load_format == "dummy" else _read(path, layers)
    if not found:
        _log.warning(
            "the checkpoint has no scales for fp8 KV: values beyond 448 are cut off "
            "(kv_cache_dtype=fp8_dynamic needs none)"
        )
    for (layer, kind), (name, value) in found.items():
        scales[layer, kind] = _checked(name, value, heads)
    wanted = {(layer, kind) for layer in range(layers) for kind in range(kinds)}
    if found and wanted - found.keys():
        layer, kind = min(wanted - found.keys())
        raise ModelError(
            f"the checkpoint has KV scales, but {'kv'[kind]}_scale of layer {layer} is missing"
        )
    if kinds == 1:
        return scales.to(model.device)
    low, high = ShardSpec(0).bounds(heads, model.group.rank, model.group.world)
    return scales[:, :, low:high].contiguous().to(model.device)


def all_head_scales(models: Sequence[DecoderLayers], path: Path, load_format: str) -> list[Tensor]:
    """Returns the scales of all layers of several models, float32 [2, KV heads] for each layer.

    The first model's scales come from its checkpoint in `path`. The other models are draft heads,
    and their scales are 1.
    """
    scales = list(head_scales(models[0], path, load_format))
    for model in models[1:]:
        scales += head_scales(model, path, "dummy")
    return scales


def _read(path: Path, layers: int) -> dict[tuple[int, int], tuple[str, Tensor]]:
    """Returns each scale's tensor name and value, by layer and by 0 for keys or 1 for values."""
    found: dict[tuple[int, int], tuple[str, Tensor]] = {}
    with contextlib.ExitStack() as stack:
        for path_of_file in weight_files(path):
            file = open_file(stack, path_of_file)
            for name in file.keys():  # noqa: SIM118 (no mapping)
                match = _STORED.search(name)
                if match is None:
                    continue
                key = int(match["layer"]), "kv".index(match["kind"] or match["output"])
                if key[0] >= layers:
                    raise ModelError(f"{name} belongs to a layer that config.json does not have")
                if key in found:
                    raise ModelError(f"{name} and {found[key][0]} are the same scale")
                found[key] = name, file.get_tensor(name)
    return found


def _checked(name: str, value: Tensor, heads: int) -> Tensor:
    """Returns a scale as float32 [1], for all heads, or [heads].

    Raises:
        ModelError: it has another shape, or is not finite and positive.
    """
    if value.numel() not in (1, heads) or not value.is_floating_point():
        raise ModelError(
            f"{name} is {tuple(value.shape)} {value.dtype}, expected one float, or {heads}"
        )
    value = value.float().flatten()
    if not all(math.isfinite(x) and x > 0 for x in value.tolist()):
        raise ModelError(f"{name} must hold positive finite scales, got {value.tolist()}")
    return value
