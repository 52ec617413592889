"""Gemma 4, text only, except the models with embeddings for each layer (Gemma Team 2026)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.errors import ModelError
from quire.layers.attention_variants import ValueNormSpec
from quire.layers.dense_and_experts import DenseAndExpertsSpec
from quire.layers.experts import ExpertsSpec
from quire.layers.mlp import MlpSpec
from quire.layers.norm import NormSpec
from quire.layers.rotary import FactorScaling, RopeSpec
from quire.models.families import experts, gemma2, layer_types, llama, rope, settings
from quire.models.families.family import Family, Source
from quire.models.families.text_config import PREFIXES
from quire.models.general_block import ScaledLayerSpec
from quire.models.spec import FfnSpec, ModelSpec
from quire.ops.experts import GELU_TANH, Routing

_DEFAULTS = {"num_key_value_heads": 4, "head_dim": 256}
_ROPES: dict[str, dict[str, Any]] = {
    "full_attention": {
        "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
_ABSENT = {
    "hidden_size_per_layer_input": "embeddings for each layer (E2B, E4B)",
    "num_kv_shared_layers": "layers that share keys and values",
}
_PARTS = {
    "mlp.router_norm.weight": "router.scale",
    "mlp.expert_scale": "router.per_expert_scale",
    "mlp.experts.router.weight": "router.proj.weight",
    "mlp.dense_out_norm.weight": "post_feedforward_layernorm_1.weight",
    "mlp.experts_norm.weight": "pre_feedforward_layernorm_2.weight",
    "mlp.experts_out_norm.weight": "post_feedforward_layernorm_2.weight",
    "mlp.dense.up.gate.weight": "mlp.gate_proj.weight",
    "mlp.dense.up.up.weight": "mlp.up_proj.weight",
    "mlp.dense.down.weight": "mlp.down_proj.weight",
    "scalar": "layer_scalar",
}
_EXPERTS = re.compile(r"mlp\.experts\.(up|down)(?:\.(?:gate|up))?\.([^.]+)")
_STEMS = {"up": "gate_up_proj", "down": "down_proj"}


def _source(spec: ModelSpec, name: str) -> Source:
    outer, _, rest = name.partition(".")
    index, _, part = rest.partition(".")
    if outer == "layers":
        if found := _EXPERTS.fullmatch(part):
            tensor = "" if found[2] == "weight" else f"_{found[2]}"
            return Source(f"model.layers.{index}.experts.{_STEMS[found[1]]}{tensor}")
        stem, _, tensor = part.rpartition(".")
        stored = _PARTS.get(part) or _PARTS.get(f"{stem}.weight")
        if stored is not None:
            stored = stored if part in _PARTS else f"{stored.removesuffix('weight')}{tensor}"
            return Source(f"model.layers.{index}.{stored}")
    return gemma2.source(spec, name)


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    _check(config)
    config = {**_DEFAULTS, **config}
    layers = settings.integer(config, "num_hidden_layers", high=settings.MOST_LAYERS)
    width = settings.integer(config, "sliding_window", 512)
    windows = layer_types.windows(config, layers, 6, width)
    plain = {"rope_parameters": None, "rope_scaling": None}
    base = gemma2.base_spec({**config, **plain}, "gemma4", windows)
    # These norms multiply by w, unlike the 1 + w of earlier generations.
    norm = NormSpec(kind="rms", eps=base.norm.eps, wide=True)
    ffn: FfnSpec = base.layers[0].ffn
    if settings.flag(config, "enable_moe_block", False):
        ffn = _experts(config, ffn, norm)
    shapes = [_mixer(config, base, norm, index, windows[index]) for index in range(layers)]
    return replace(
        base,
        norm=norm,
        layers=tuple(ScaledLayerSpec(mixer, ffn, norms="both") for mixer in shapes),
        max_positions=settings.integer(
            config, "max_position_embeddings", 131072, high=settings.MOST_POSITIONS
        ),
    )


def _check(config: Mapping[str, Any]) -> None:
    given = {"hidden_size_per_layer_input": 256, **config}
    for name, meaning in _ABSENT.items():
        if given.get(name):
            raise ModelError(f"config.json: {name}={given[name]!r} is not supported: {meaning}")
    # "vision" makes only images bidirectional, and text stays causal.
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise ModelError(
            "config.json: use_bidirectional_attention="
            f"{config['use_bidirectional_attention']!r} is not supported"
        )


def _mixer(
    config: Mapping[str, Any], base: ModelSpec, norm: NormSpec, index: int, window: int | None
) -> ValueNormSpec:
    """Returns a layer's attention. Layers without a window have their own sizes of heads."""
    plain = base.attention[0]
    head_dim, kv_heads, keys_as_values = plain.head_dim, plain.kv_heads, False
    kind = "full_attention" if window is None else "sliding_attention"
    if window is None:
        keys_as_values = settings.flag(config, "attention_k_eq_v", False)
        head_dim = settings.integer(config, "global_head_dim", 512, high=settings.MOST_HEAD_DIM)
        if keys_as_values:
            kv_heads = settings.integer(config, "num_global_key_value_heads", kv_heads)
    # transformers 5 writes a layer's settings here.
    own = _object(_object(config, "per_layer_config"), str(index))
    head_dim = settings.integer(own, "head_dim", head_dim)
    kv_heads = settings.integer(own, "num_key_value_heads", kv_heads)
    if plain.heads % kv_heads:
        raise ModelError(
            f"config.json: {plain.heads} attention heads cannot share {kv_heads} key/value heads "
            "evenly"
        )
    ropes = _object(config, "rope_parameters")
    trained = settings.integer(
        config, "max_position_embeddings", 131072, high=settings.MOST_POSITIONS
    )
    return ValueNormSpec(
        heads=plain.heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=1.0,
        qkv_bias=plain.qkv_bias,
        out_bias=plain.out_bias,
        qk_norm=norm,
        window=window,
        rope=_rope(_object(ropes, kind) or _ROPES[kind], head_dim, trained),
        value_eps=norm.eps,
        keys_as_values=keys_as_values,
    )


def _object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns the object under a key of config.json, by default an empty one."""
    found = config.get(name) or {}
    if not isinstance(found, Mapping):
        raise ModelError(f"config.json: {name} must be an object, got {found!r}")
    return found


def _rope(given: Mapping[str, Any], head_dim: int, trained: int) -> RopeSpec:
    """Returns a layer's rotary positions.

    The type "proportional" uses the frequencies of the whole head, but rotates only the first
    dimensions of each half.
    """
    if given.get("rope_type") != "proportional":
        found: RopeSpec = rope.rope_spec({"rope_parameters": given}, head_dim, trained)
        return found
    pairs = head_dim // 2
    share = settings.number(given, "partial_rotary_factor", 1.0)
    if share > 1:
        raise ModelError(f"config.json: partial_rotary_factor must be at most 1, got {share:g}")
    turning = int(share * head_dim // 2)
    factor = settings.number(given, "factor", 1.0)
    factors = (factor,) * turning + (math.inf,) * (pairs - turning)
    return RopeSpec(settings.number(given, "rope_theta"), head_dim, FactorScaling(factors, 1.0))


def _experts(config: Mapping[str, Any], dense: Any, norm: NormSpec) -> DenseAndExpertsSpec:
    if not isinstance(dense, MlpSpec):
        raise ModelError("config.json: a layer with experts must have a dense part too")
    count = experts.count(config)
    own = ExpertsSpec(
        experts=count,
        width=settings.integer(config, "moe_intermediate_size", high=settings.MOST_FEATURES),
        routing=Routing(top_k=settings.integer(config, "top_k_experts", high=count)),
        act=GELU_TANH,
        layout="fused",
    )
    return DenseAndExpertsSpec(dense=dense, experts=own, norm=norm)


FAMILY = Family(
    name="gemma4",
    spec=_spec,
    source=_source,
    prefixes=PREFIXES,
    ignored=re.compile(
        rf"^(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio)\.|{llama.IGNORED.pattern}"
    ),
    implements=(*gemma2.IMPLEMENTS, *experts.COUNTS, "use_bidirectional_attention"),
)
