"""The vision towers of Qwen2.5-VL, and of Qwen3-VL and Qwen3.5 (Bai et al. 2025)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from quire.errors import ModelError
from quire.layers.norm import NormSpec
from quire.models.families import settings
from quire.models.families.family import Source, VisionHalf
from quire.models.vision.spec import VisionSpec
from quire.ops import Activation

_PREFIXES = {"model.visual.": "visual."}
_EPS = 1e-6
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}

_QWEN2_STEMS = {
    "qkv": "attn.qkv",
    "out": "attn.proj",
    "up.gate": "mlp.gate_proj",
    "up.up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_QWEN3_STEMS = {
    "qkv": "attn.qkv",
    "out": "attn.proj",
    "up": "mlp.linear_fc1",
    "down": "mlp.linear_fc2",
}
_QWEN2_MERGER = {"norm": "ln_q", "up": "mlp.0", "down": "mlp.2"}
_QWEN3_MERGER = {"norm": "norm", "up": "linear_fc1", "down": "linear_fc2"}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.([^.]+)")
_MERGER = re.compile(r"(?:merger|deep\.(\d+))\.([^.]+)\.([^.]+)")


def vision_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns `vision_config` of config.json."""
    found = config.get("vision_config")
    if not isinstance(found, Mapping):
        raise ModelError("config.json: vision_config must be an object")
    return found


def _spec(
    vision: Mapping[str, Any], act: Activation, norm: NormSpec, default: int, **more: Any
) -> VisionSpec:
    """Returns what the towers have in common.

    Args:
        vision: `vision_config` of config.json.
        act: activation of the feed-forward layers.
        norm: kind of all norms.
        default: side of a patch in configs without it.
        more: further fields of the spec.
    """
    most = settings.MOST_FEATURES
    hidden = settings.integer(vision, "hidden_size", high=most)
    heads = settings.integer(vision, "num_heads", 16, high=settings.MOST_HEADS)
    # Half of a head turns by the row and half by the column, each in pairs.
    if hidden % (4 * heads):
        raise ModelError(
            f"config.json: vision_config: hidden_size {hidden} is not a multiple of 4 times "
            f"{heads} heads"
        )
    channels = settings.integer(vision, "in_channels", settings.integer(vision, "in_chans", 3))
    if channels != 3:
        raise ModelError(f"config.json: vision_config: in_channels={channels} is not supported")
    rotary = vision.get("rope_parameters") or {}
    return VisionSpec(
        layers=settings.integer(vision, "depth", high=settings.MOST_LAYERS),
        hidden_size=hidden,
        heads=heads,
        width=settings.integer(vision, "intermediate_size", high=most),
        act=act,
        norm=norm,
        channels=channels,
        temporal=settings.integer(vision, "temporal_patch_size", 2, high=64),
        patch=settings.integer(vision, "patch_size", default, high=1024),
        merge=settings.integer(vision, "spatial_merge_size", 2, high=64),
        outputs=settings.integer(vision, "out_hidden_size", high=most),
        theta=settings.number(rotary, "rope_theta", 10000.0),
        **more,
    )


def _indices(vision: Mapping[str, Any], name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the indices of layers under a key."""
    depth = settings.integer(vision, "depth", high=settings.MOST_LAYERS)
    found = vision.get(name, default)
    fine = isinstance(found, list | tuple) and all(
        type(index) is int and 0 <= index < depth for index in found
    )
    if not fine or len(set(found)) != len(found):
        raise ModelError(
            f"config.json: vision_config: {name} must be different layers from 0 to {depth - 1}, "
            f"got {found!r}"
        )
    return tuple(found)


def _qwen2_spec(config: Mapping[str, Any]) -> VisionSpec:
    vision = vision_config(config)
    settings.choice(vision, "hidden_act", {"silu": None}, "silu")
    norm = NormSpec(kind="rms", eps=_EPS)
    full = _indices(vision, "fullatt_block_indexes", (7, 15, 23, 31))
    spec = _spec(
        vision, "silu_and_mul", norm, 14, patch_bias=False, full_layers=frozenset(full),
        window=settings.integer(vision, "window_size", 112, high=1 << 20),
    )  # fmt: skip
    if spec.window < spec.patch * spec.merge:
        raise ModelError(
            f"config.json: vision_config: window_size {spec.window} is smaller than a token's "
            f"{spec.patch * spec.merge} pixels"
        )
    return spec


def _qwen3_spec(config: Mapping[str, Any]) -> VisionSpec:
    vision = vision_config(config)
    act = settings.choice(vision, "hidden_act", _ACTIVATIONS, "gelu_pytorch_tanh")
    places = settings.integer(vision, "num_position_embeddings", 2304, high=1 << 20)
    side = math.isqrt(places)
    if side * side != places:
        raise ModelError(
            f"config.json: vision_config: num_position_embeddings {places} is not a square"
        )
    # Only Qwen3-VL has DeepStack, and its configs name the layers.
    deepstack = _indices(vision, "deepstack_visual_indexes", ())
    norm = NormSpec(kind="layer", eps=_EPS)
    return _spec(vision, act, norm, 16, patch_bias=True, side=side, deepstack=deepstack)


def _place(name: str, stems: Mapping[str, str], merger: Mapping[str, str]) -> Source:
    if found := _LAYER.fullmatch(name):
        index, stem, tensor = found.groups()
        return Source(f"visual.blocks.{index}.{stems.get(stem, stem)}.{tensor}")
    if found := _MERGER.fullmatch(name):
        index, stem, tensor = found.groups()
        where = "merger" if index is None else f"deepstack_merger_list.{index}"
        return Source(f"visual.{where}.{merger[stem]}.{tensor}")
    stem, _, tensor = name.rpartition(".")
    known = {"patches": "patch_embed.proj", "positions": "pos_embed"}
    return Source(f"visual.{known[stem]}.{tensor}")


def _qwen2_source(spec: VisionSpec, name: str) -> Source:
    return _place(name, _QWEN2_STEMS, _QWEN2_MERGER)


def _qwen3_source(spec: VisionSpec, name: str) -> Source:
    return _place(name, _QWEN3_STEMS, _QWEN3_MERGER)


QWEN2 = VisionHalf(_qwen2_spec, _qwen2_source, _PREFIXES)
QWEN3 = VisionHalf(_qwen3_spec, _qwen3_source, _PREFIXES)
